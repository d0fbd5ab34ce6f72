"""What happens in a coded step, and its progress. Imports no torch: logs are read without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from planaria.control.started import Fact
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
    """Replicas that have not sent their results of a round of a coded step by now are its stragglers."""

    kind: Literal["round_late"] = "round_late"
    replica: int
    generation: int
    step: int
    round: int
    fastest_s: float
    """that the first of them took"""


class CloseRound(Fact):
    """A round of a coded step is over. The results of these replicas count; the others drop what they are computing."""

    kind: Literal["close_round"] = "close_round"
    interrupts: ClassVar[bool] = True
    replica: int = 0
    generation: int
    step: int
    round: int
    counted: list[int]
    """replicas whose gradients are added up, in order"""


@dataclass(frozen=True)
class CodedStep:
    """A step whose replicas work in rounds, in which some are done without (``exchange/coded/``)."""

    counted: tuple[frozenset[int], ...] = ()
    """of each round that is over, the replicas whose results count"""
    sent: frozenset[int] = frozenset()
    """nodes that have sent all their results of the round under way"""
    late: bool = False
    """has it been long enough for those that are no stragglers?"""

    def done(self, arrangement: Arrangement) -> frozenset[int]:
        """The replicas that have sent their results of the round under way, at every stage."""
        nodes = [arrangement.nodes(stage) for stage in arrangement.stages]
        return frozenset(r for r in range(len(nodes[0])) if all(held[r] in self.sent for held in nodes))

    def closed(self, counted: frozenset[int]) -> CodedStep:
        """The next round, once these have counted in this one."""
        return CodedStep((*self.counted, counted))
