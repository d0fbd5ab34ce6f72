"""Measurements that workers report, and slow links. They are logged, so that a replay finds the same slow workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planaria.control.facts.run_started import Fact

STEPS_PER_REPORT = 2
"""steps between two reports of a worker"""
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class PassDurations(Fact):
    """Durations of the passes of one kind."""

    count: Count
    median_s: Finite


class EdgeTravelTimes(Fact):
    """Travel times of the activations over one edge, from the sender's handover to arrival, by both clocks."""

    frames: Count
    low_s: Finite
    """25th percentile: noise only delays"""
    high_s: Finite
    """95th percentile"""


class WorkerMeasurements(Fact):
    """A worker's measurements of its last steps."""

    kind: Literal["worker_measurements"] = "worker_measurements"
    worker: str
    node: int
    stage: int
    generation: int
    step: int
    """the last of them"""
    steps: Annotated[int, Field(ge=1, lt=1 << 31)]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """total duration, from the order to completion, including waits"""
    passes: dict[Literal["forward", "backward"], PassDurations]
    waited: dict[int, Finite]
    """node → seconds spent waiting for its frames"""
    flows: dict[int, EdgeTravelTimes]
    """node → activations received from it"""
    read_s: Finite = 0.0
    """seconds per step until its batches were read; not part of a pass"""

    @property
    def pass_s(self) -> float:
        """Seconds of a microbatch's passes, forward and backward."""
        return sum(passes.median_s for passes in self.passes.values())

    @property
    def busy_s(self) -> float:
        """Seconds of all passes of a step."""
        return sum(passes.median_s * passes.count for passes in self.passes.values()) / self.steps


class SlowLink(Fact):
    """A slow link from one node to another."""

    source: int
    target: int
    seconds: Finite
    """travel time of an activation"""
