"""The progress of a coded step: replicas whose results counted in its rounds, and nodes that have sent theirs."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.pipeline.routing.arrangement import Arrangement


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
