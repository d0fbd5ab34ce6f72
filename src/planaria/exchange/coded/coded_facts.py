"""Events of a coded step, and its progress. Does not import torch, so that logs can be read without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from planaria.control.facts.run_started import Fact
from planaria.pipeline.routing.arrangement import Arrangement


class ResultsSent(Fact):
    """A worker has sent all its results of a round of a coded step to the other nodes of its stage."""

    kind: Literal["results_sent"] = "results_sent"
    worker: str
    node: int
    stage: int
    generation: int
    step: int
    round: int


class RoundLate(Fact):
    """Replicas without results in this round of a coded step have become stragglers."""

    kind: Literal["round_late"] = "round_late"
    replica: int
    generation: int
    step: int
    round: int
    fastest_s: float
    """time of the first replica"""


class CloseRound(Fact):
    """A round of a coded step ends. The results of these replicas count; the others drop what they are computing."""

    kind: Literal["close_round"] = "close_round"
    interrupts: ClassVar[bool] = True
    replica: int = 0
    generation: int
    step: int
    round: int
    counted: list[int]
    """replicas whose gradients are summed, in order"""


@dataclass(frozen=True)
class CodedStep:
    """A step whose replicas work in rounds that may end without some of them (``exchange/coded/``)."""

    counted: tuple[frozenset[int], ...] = ()
    """replicas whose results count, for each completed round"""
    sent: frozenset[int] = frozenset()
    """nodes that have sent all their results of the current round"""
    late: bool = False
    """whether replicas without results are stragglers"""

    def done(self, arrangement: Arrangement) -> frozenset[int]:
        """Return the replicas whose nodes at every stage have sent their results of the current round."""
        nodes = [arrangement.nodes(stage) for stage in arrangement.stages]
        return frozenset(r for r in range(len(nodes[0])) if all(stage_nodes[r] in self.sent for stage_nodes in nodes))

    def next_round(self, counted: frozenset[int]) -> CodedStep:
        """Return the next round, after the ``counted`` replicas' results of this one."""
        return CodedStep((*self.counted, counted))
