"""Several strategies in the order in which they are tried: each gets the lost stages that those before it refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from planaria.model.state import StageState
from planaria.recovery.base import Copy, Recovery, Replica, RollbackTo, Workshop
from planaria.routing.arrangement import Arrangement


class Slot(NamedTuple):
    """A copy, and whose idea it is. Senders and hosts name copies by their place in ``Chain.slots``."""

    by: str
    copy: Copy


@dataclass(frozen=True)
class Plan:
    """What becomes of lost stages: rebuilt (by which strategy, from whom), or all rolled back, or nothing works."""

    rebuilt: Mapping[int, tuple[str, tuple[int, ...]]]
    rollback: RollbackTo | None
    reason: str
    """why some stages are beyond rescue; empty if none are"""


class Chain:
    """The strategies of a recipe, by name."""

    def __init__(self, strategies: Mapping[str, Recovery], stages: int) -> None:
        self.strategies, self.stages = dict(strategies), stages
        self.slots = [Slot(name, copy) for name, each in self.strategies.items() for copy in each.copies(stages)]

    def plan(self, lost: frozenset[int], ages: Mapping[int, int]) -> Plan:
        """Every lost stage goes to the first strategy that can rebuild it; what is left rolls back, if one can."""
        left = lost
        rebuilt: dict[int, tuple[str, tuple[int, ...]]] = {}
        refused: dict[tuple[int, str], str] = {}
        for name, strategy in self.strategies.items():
            # A stage that an earlier strategy rebuilds is lost all the same: it gives nothing, so all are asked for.
            answer = strategy.donors(lost, Replica(self.stages, ages))
            if answer.rollback and left:
                return Plan({}, answer.rollback, "")
            rebuilt |= {stage: (name, donors) for stage, donors in answer.donors.items() if stage in left}
            refused |= {(stage, name): why for stage, why in answer.refused.items()}
            left -= answer.donors.keys()
        reasons = [f"{name} cannot, {why}" for (stage, name), why in sorted(refused.items()) if stage in left]
        return Plan(dict(sorted(rebuilt.items())), None, "; ".join(dict.fromkeys(reasons)))

    def placed(self, there: Arrangement) -> list[Slot]:
        """The slots with nodes for stages: the first node of a stage sends for it, and keeps what the stage hosts."""
        first = {stage: there.nodes(stage)[0] for stage in there.stages}
        return [Slot(by, Copy(tuple(first[s] for s in copy.sources), first[copy.host])) for by, copy in self.slots]

    def give(self, by: str, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        return self.strategies[by].give(lost, own, kept)

    def rebuild(self, by: str, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        return self.strategies[by].rebuild(stage, given, at)


def ages_by_stage(everywhere: Arrangement, alive: Arrangement, ages: Mapping[int, int]) -> dict[int, int]:
    """``ages`` of nodes as strategies are told of them: those of the nodes that keep copies, if these are alive."""
    first = {stage: everywhere.nodes(stage)[0] for stage in everywhere.stages}
    return {stage: ages.get(node, 0) if node in alive.stage else 0 for stage, node in first.items()}
