"""A chain of recovery strategies: each handles the lost stages that the earlier ones refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from planaria.common.errors import UserError
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.recovery.base import Copy, DamagedReplica, Recovery, RollbackTarget
from planaria.recovery.snapshot_schedule import SnapshotSchedule


class CopySlot(NamedTuple):
    """A copy and the strategy that keeps it. Messages name copies by index in ``Chain.slots``."""

    strategy: str
    copy: Copy


@dataclass(frozen=True)
class ChainPlan:
    """The plan for lost stages: rebuild them, roll all stages back, or neither.

    In a rollback to memory, ``rebuilt`` has the stages that lost their snapshot.
    """

    rebuilt: Mapping[int, tuple[str, tuple[int, ...]]]
    """lost stage → (strategy, donors)"""
    rollback: RollbackTarget | None
    reason: str
    """why some stages cannot be recovered; empty if all can"""


class Chain:
    """The strategies of a recipe, by name."""

    def __init__(self, strategies: Mapping[str, Recovery], stages: int) -> None:
        self.strategies = dict(strategies)
        self.stages = stages
        self.control_strategy = self._find_control()
        """name of the strategy, if it is a control; else empty"""
        self.retaining = self._find_retaining()
        """name and schedule of the strategy that retains snapshots of all stages, or None if no strategy does"""
        self.slots = [CopySlot(name, copy) for name, each in self.strategies.items() for copy in each.copies(stages)]

    def _find_control(self) -> str:
        name = next((name for name, each in self.strategies.items() if each.control_description), "")
        if name and len(self.strategies) > 1:
            raise UserError(
                f"recovery.strategy: {name!r} is a control that handles every loss; remove the other strategies"
            )
        return name

    @property
    def snapshot_strategy(self) -> Recovery:
        """The strategy that retains snapshots; there must be one."""
        assert self.retaining is not None
        return self.strategies[self.retaining[0]]

    def _find_retaining(self) -> tuple[str, SnapshotSchedule] | None:
        schedules = {name: each.snapshot_schedule for name, each in self.strategies.items()}
        retaining = [(name, schedule) for name, schedule in schedules.items() if schedule is not None]
        if len(retaining) > 1:
            both = " and ".join(repr(name) for name, _ in retaining[:2])
            raise UserError(f"recovery.strategy: {both} both retain snapshots of all stages; remove one of them")
        return retaining[0] if retaining else None

    def plan(
        self, lost: frozenset[int], staleness: Mapping[int, int], with_snapshot: Collection[int] | None = None
    ) -> ChainPlan:
        """Assign each lost stage to the first strategy that can rebuild it; roll back if a strategy does so for the
        rest.

        ``staleness`` and ``with_snapshot`` as in :class:`DamagedReplica`; by default, all stages that are not lost and
        have committed a step since their last holder took over hold a snapshot.
        """
        left = lost
        if with_snapshot is None:
            with_snapshot = {stage for stage, age in staleness.items() if age and stage not in lost}
        rebuilt: dict[int, tuple[str, tuple[int, ...]]] = {}
        refused: dict[tuple[int, str], str] = {}
        for name, strategy in self.strategies.items():
            # Stages that earlier strategies rebuild cannot donate either, so each strategy sees all lost stages.
            plan = strategy.donors(lost, DamagedReplica(self.stages, staleness, frozenset(with_snapshot)))
            if plan.rollback and left:
                donors = {stage: (name, donors) for stage, donors in sorted(plan.donors.items())}
                return ChainPlan(donors, plan.rollback, "")
            rebuilt |= {stage: (name, donors) for stage, donors in plan.donors.items() if stage in left}
            refused |= {(stage, name): why for stage, why in plan.refused.items()}
            left -= plan.donors.keys()
        reasons = {f"{name} cannot rebuild it: {refused[s, name]}": s for s, name in sorted(refused) if s in left}
        return ChainPlan(dict(sorted(rebuilt.items())), None, "; ".join(reasons))

    def slots_on_nodes(self, arrangement: Arrangement) -> list[CopySlot]:
        """Return the slots with nodes instead of stages: a stage's first node sends and hosts for it."""
        first = {stage: arrangement.nodes(stage)[0] for stage in arrangement.stages}
        return [
            CopySlot(strategy, Copy(tuple(first[s] for s in copy.sources), first[copy.host]))
            for strategy, copy in self.slots
        ]


def staleness_by_stage(everywhere: Arrangement, alive: Arrangement, staleness: Mapping[int, int]) -> dict[int, int]:
    """Return ``staleness`` by stage: that of each stage's first node, 0 if it is not alive."""
    first = {stage: everywhere.nodes(stage)[0] for stage in everywhere.stages}
    return {stage: staleness.get(node, 0) if node in alive.stage else 0 for stage, node in first.items()}
