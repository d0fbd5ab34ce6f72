"""The section of a recipe on the costs of computing, sending and failing."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planaria.config import bounds
from planaria.config.bounds import Fraction, Seconds
from planaria.config.section import Section, formerly


class NetworkConfig(Section):
    forward_s: list[Seconds] = Field(default_factory=list)
    """seconds of one microbatch's forward pass at stages 0..S (one number: all equal); costs for simulate"""
    backward_s: list[Seconds] = Field(default_factory=list)
    """seconds of one microbatch's backward pass at stages 0..S (one number: all equal)"""
    entry_forward_s: Seconds = 0.0
    """seconds of one microbatch's forward pass at its data node, before it is sent (``model.ends_layers``)"""
    entry_backward_s: Seconds = 0.0
    """seconds of the backward pass that ends at its data node"""
    topology: str | None = None
    """planning: TOML file of sites, links and nodes, next to the recipe or at this path"""
    link_time_scale: Annotated[bounds.Scale, formerly("link_time_scale", "scale")] = 1.0
    """factor on times of the topology's links"""
    latency_s: Seconds = 0.0
    """one-way latency between neighbouring workers"""
    bandwidth: bounds.Bandwidth | None = None
    """bytes per second between neighbouring workers; unlimited by default"""
    inbound: Literal["each", "shared"] = "each"
    """messages that queue for the bandwidth: those from one neighbour (each), or all messages to a worker (shared)"""
    latency_queued: bool = False
    """count the latency as part of the time that a message occupies its link; otherwise latencies overlap"""
    staging_bandwidth: bounds.Bandwidth | None = None
    """planning and predictions: bytes per second between a device and host memory, which all messages between stages
    cross; unlimited by default"""
    overlap: bool = True
    """planning and predictions: these copies overlap with computation; false: a stage does not compute meanwhile"""
    store_bandwidth: bounds.Bandwidth | None = None
    """bytes per second between each worker and the checkpoint store; unlimited by default"""
    memory_bandwidth: bounds.Bandwidth | None = None
    """bytes per second at which a worker copies its own state (for checkpoint.background, and for the optimal snapshot
    interval); unlimited by default"""
    replacement_s: Seconds = 0.0
    """seconds from a worker's death until its replacement can receive a state"""
    hourly_failure_probability: Annotated[Fraction, formerly("hourly_failure_probability", "hourly")] = 0.1
    """probability that one worker fails within an hour; for advice, and for the optimal checkpoint interval"""
    straggle_probability: Annotated[Fraction, formerly("straggle_probability", "straggle")] = 0.0
    """emulation: probability that a replica is slow from one round of its exchange to the next"""
    straggle_factor: Annotated[float, Field(ge=1), formerly("straggle_factor", "straggle_times")] = 5.0
    """emulation: factor on the duration of its passes while it is slow"""
    straggle_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """emulation: seconds of each independently drawn period of slowness; a round by default"""
    emulate: bool | Literal["links"] = False
    """emulate the costs in this section, or of the schedule, on the fleet: links delay messages, and stages sleep
    instead of computing unless this is 'links'"""

    @model_validator(mode="after")
    def _check_staging_bandwidth(self) -> Self:
        if self.staging_bandwidth is None:
            if not self.overlap:
                raise ValueError("network.overlap = false: copies take no time; set network.staging_bandwidth")
            return self
        why = ""
        if self.emulate:
            why = "an emulated fleet has no devices; remove it or network.emulate"
        elif self.topology is not None:
            why = "on a topology, `planaria plan` weighs links alone; remove it"
        elif not (self.forward_s or self.backward_s):
            why = "copies overlap with passes, which take no time; set network.forward_s and network.backward_s"
        if why:
            raise ValueError(f"network.staging_bandwidth = {self.staging_bandwidth:g}: {why}")
        return self
