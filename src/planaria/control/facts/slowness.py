"""Decisions about slow parts: findings, and the reactions to them."""

from __future__ import annotations

from typing import Literal

from planaria.control.facts.run_started import Fact

SlownessKind = Literal[
    "slow worker", "slow host", "slow data", "slow link", "slow sender", "slow receiver", "flaky link", "stuck link"
]


class SlowPartFound(Fact):
    """A worker, machine or link is slow, according to measurements (``control/slowness/``)."""

    kind: Literal["slow_part_found"] = "slow_part_found"
    replica: int
    step: int
    """step after which it was found"""
    fault: SlownessKind
    nodes: list[int]
    """the worker's node, or those of a host's workers; for a link, sender and receiver"""
    workers: list[str]
    """workers at these nodes"""
    seconds: float
    """current duration: a microbatch's passes, an activation's travel time, or reading a step's batches"""
    initial_s: float
    """initial duration"""
    peer_median_s: float
    """the others' median per unit of work; 0 without others"""


class Cleared(Fact):
    """A blamed part is no longer slow, or another worker replaced it."""

    kind: Literal["cleared"] = "cleared"
    replica: int
    step: int
    fault: SlownessKind
    nodes: list[int]


class HandOverSlowStage(Fact):
    """A slow worker must hand its stage to a spare, because that pays; it becomes the last of the spares."""

    kind: Literal["hand_over_slow_stage"] = "hand_over_slow_stage"
    replica: int
    step: int
    node: int
    worker: str
    step_s: float
    """current seconds per step"""
    predicted_s: float
    """expected seconds per step afterwards"""
    cost_s: float
    """seconds of the handover: the longest time a worker has taken to link"""


class Reroute(Fact):
    """Microbatches switch to the plan found around slow links, because that pays."""

    kind: Literal["reroute"] = "reroute"
    replica: int
    step: int
    before_s: float
    """simulated step on the current routes, with links as measured"""
    predicted_s: float
    """simulated step on the new routes"""
    cost_s: float
    """seconds of a new generation: the longest time a worker has taken to link"""
