"""The section of a recipe on what computing, sending and failing cost."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planaria.config import bounds
from planaria.config.bounds import Fraction, Seconds
from planaria.config.section import Section


class NetworkConfig(Section):
    forward_s: list[Seconds] = Field(default_factory=list)
    """seconds of one microbatch's forward at stages 0..S (one number: all alike); simulate's costs"""
    backward_s: list[Seconds] = Field(default_factory=list)
    """seconds of one microbatch's backward at stages 0..S (one number: all alike)"""
    entry_forward_s: Seconds = 0.0
    """planning: seconds of one microbatch's forward at its data node, before it sets out"""
    entry_backward_s: Seconds = 0.0
    """planning: seconds of the backward with which it ends there"""
    topology: str | None = None
    """planning: TOML file of sites, links and nodes, beside the recipe or at this path"""
    scale: bounds.Scale = 1.0
    """times on the topology's links are multiplied by this"""
    latency_s: Seconds = 0.0
    """one-way latency between neighbouring workers"""
    bandwidth: bounds.Bandwidth | None = None
    """bytes per second between neighbouring workers; unlimited unless given"""
    staging_bandwidth: bounds.Bandwidth | None = None
    """planning and predictions: bytes per second between a device and its host's memory, through which all passes that
    is sent between stages; unlimited unless given"""
    overlap: bool = True
    """planning and predictions: these copies go on beside computing; false: a stage computes nothing meanwhile"""
    store_bandwidth: bounds.Bandwidth | None = None
    """bytes per second between each worker and the store of checkpoints; unlimited unless given"""
    memory_bandwidth: bounds.Bandwidth | None = None
    """bytes per second at which a worker copies its own state (for checkpoint.background, and for the best
    interval between snapshots); unlimited unless given"""
    replacement_s: Seconds = 0.0
    """seconds from a worker's death until its replacement is ready for a state"""
    hourly: Fraction = 0.1
    """probability that one worker fails within an hour; for advice, and for the best interval between checkpoints"""
    straggle: Fraction = 0.0
    """emulated: chance that a replica is slow between one round of its exchange and the next"""
    straggle_times: Annotated[float, Field(ge=1)] = 5.0
    """emulated: how many times as long its passes take then"""
    straggle_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """emulated: seconds that slowness lasts, if not a round; each piece of time is drawn for itself"""
    emulate: bool | Literal["links"] = False
    """make the fleet cost what this section, or the schedule, says: links delay what they carry, and unless it is only
    'links', stages sleep instead of computing"""

    @model_validator(mode="after")
    def _copies_count(self) -> Self:
        if self.staging_bandwidth is None:
            if not self.overlap:
                raise ValueError("network.overlap = false: copies take no time; give network.staging_bandwidth")
            return self
        why = ""
        if self.emulate:
            why = "an emulated fleet has no devices; leave it or network.emulate out"
        elif self.topology is not None:
            why = "on a topology, `planaria plan` weighs links alone; leave it out"
        elif not (self.forward_s or self.backward_s):
            why = "copies go on beside passes, which take no time; give network.forward_s and network.backward_s"
        if why:
            raise ValueError(f"network.staging_bandwidth = {self.staging_bandwidth:g}: {why}")
        return self
