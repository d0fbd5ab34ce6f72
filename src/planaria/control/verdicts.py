"""What is found to be slow, and what is done about it: decisions, as plain data."""

from __future__ import annotations

from typing import Literal

from planaria.control.started import Fact

Fault = Literal[
    "slow worker", "slow host", "slow data", "slow link", "slow sender", "slow receiver", "flaky link", "stuck link"
]


class Blamed(Fact):
    """Something is slow: found from what workers measure (``control/diagnosis.py``)."""

    kind: Literal["blamed"] = "blamed"
    replica: int
    step: int
    """after which it was found"""
    fault: Fault
    nodes: list[int]
    """the worker's node, or those of the workers of a host; of a link, the sender and the receiver"""
    workers: list[str]
    """who stands there"""
    seconds: float
    """what it takes now: a microbatch's passes, an activation's way, or a step's batches until they are read"""
    past: float
    """what it took at first"""
    usual: float
    """what it takes elsewhere: the median of the others, per unit of work; 0 where there are none"""


class Cleared(Fact):
    """It is slow no more, or somebody else stands there."""

    kind: Literal["cleared"] = "cleared"
    replica: int
    step: int
    fault: Fault
    nodes: list[int]


class Unequal(Fact):
    """Replicas whose weights of a stage are to be equal, bit for bit, and were not when they were saved.

    A machine computes wrongly, or otherwise than the others: another processor may round otherwise.
    """

    stage: int
    replicas: list[int]
    """that were compared"""
    odd: list[int]
    """those that differ from more than half of at least three; empty where there is no such half"""


class Relieve(Fact):
    """A slow worker is to hand its stage to a spare, because that pays; it becomes the last of the spares."""

    kind: Literal["relieve"] = "relieve"
    replica: int
    step: int
    node: int
    worker: str
    step_s: float
    """seconds of a step now"""
    predicted_s: float
    """and afterwards"""
    cost_s: float
    """of handing over: the longest that anybody has taken to take a place"""


class Reroute(Fact):
    """Microbatches are to go by the plan that was found around slow links, because that pays."""

    kind: Literal["reroute"] = "reroute"
    replica: int
    step: int
    before_s: float
    """simulated step by the routes as they are, over the links as measured"""
    predicted_s: float
    """and by the new ones"""
    cost_s: float
    """of another generation: the longest that anybody has taken to take a place"""
