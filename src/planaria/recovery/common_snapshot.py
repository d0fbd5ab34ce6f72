"""Base of strategies in which all stages retain a snapshot of the same step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from planaria.common.errors import UserError
from planaria.recovery.base import (
    Copy,
    DamagedReplica,
    Holder,
    MachineProperties,
    Original,
    Recovery,
    Sender,
    StrategyRequirements,
)
from planaria.recovery.checkpoint import best_steps
from planaria.recovery.codes.base import ErasureCode
from planaria.recovery.parity import BlockSender, ParityHolder, SelfCopyHolder, SelfCopySender
from planaria.recovery.snapshot_schedule import SnapshotSchedule

COPY_BANDWIDTH = 5e9
"""bytes per second at which a stage copies its state while training waits, unless ``network.memory_bandwidth`` is
set; about one CPU core's rate"""
LINK_SHARE = 0.25
"""maximum share of each link's time for snapshots"""
NO_SNAPSHOT = "no snapshot is complete yet"


class CommonSnapshot(Recovery, ABC):
    """Options of strategies that retain snapshots."""

    requirements: ClassVar[StrategyRequirements] = StrategyRequirements(
        meanwhile="wait", why="other workers' copies of a skipped stage would become stale"
    )
    exact: ClassVar[bool] = True
    former: ClassVar[Mapping[str, str]] = {"outlive": "persist"}
    former_members: ClassVar[Mapping[str, str]] = {**Recovery.former_members, "sent": "copies_sent_per_snapshot"}

    every: Annotated[int, Field(ge=0)] | Literal["best"] = 0
    """steps between snapshots, to which all stages roll back after a loss; 0: parities follow every step, without
    rollback; best: the interval that loses least at the recipe's [network], in slices that leave most of each link to
    training"""
    slices: int = Field(1, ge=1)
    """steps over which a snapshot is sent"""
    persist: bool = False
    """also write snapshots to files in the machine's memory, in case all processes die"""

    def copies_sent_per_snapshot(self, members: int) -> int:
        """Return how many times its own state's size each of ``members`` stages sends per snapshot."""
        return 1

    @abstractmethod
    def block_of(self, copy: Copy, stage: int) -> tuple[int, int]:
        """Return the number of the block that ``stage`` sends for a copy, and the number of blocks of its state."""

    @abstractmethod
    def code_of(self, copy: Copy) -> ErasureCode:
        """Return the code whose only parity the host keeps of the sources' blocks."""

    def sender(self, copy: Copy, stage: int) -> Sender:
        if copy.is_self_copy:
            return SelfCopySender(self.snapshot_schedule)
        return BlockSender(*self.block_of(copy, stage), self.snapshot_schedule)

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        if copy.is_self_copy:
            return SelfCopyHolder(self.snapshot_schedule)
        return ParityHolder(copy.sources, self.code_of(copy), self.snapshot_schedule)

    @staticmethod
    def without_snapshot(lost: frozenset[int], replica: DamagedReplica) -> frozenset[int]:
        """Return the lost stages, and new ones that lack the snapshot because they have not taken part in one since."""
        return lost | {stage for stage in range(replica.stages + 1) if stage not in replica.with_snapshot}

    @property
    def has_best_options(self) -> bool:
        return self.every == "best"

    def resolve_best(self, machines: MachineProperties) -> Mapping[str, object]:
        if not self.has_best_options:
            return {}
        if not machines.hourly:
            raise UserError(
                "network.hourly_failure_probability = 0: without failures no interval is best; set "
                "recovery.options.every to a number"
            )
        copied_s = machines.state_bytes / (machines.memory_bandwidth or COPY_BANDWIDTH)
        best = best_steps(machines.hourly, machines.members, machines.step_s, copied_s)
        sent_bytes = self.copies_sent_per_snapshot(machines.members) * machines.state_bytes
        slices = max(1, math.ceil(sent_bytes / (machines.bandwidth * machines.step_s * LINK_SHARE)))
        return {"every": max(best, slices), "slices": slices}

    @property
    def snapshot_schedule(self) -> SnapshotSchedule:
        if self.every == "best":
            raise UserError("recovery.options.every = 'best' is resolved from a run's recipe; set a number")
        if self.every and self.slices > self.every:
            raise UserError(
                f"recovery.options.slices = {self.slices}: a snapshot must be complete before the next one begins, "
                f"every = {self.every} steps later; lower it"
            )
        if not self.every and self.slices > 1:
            raise UserError(
                f"recovery.options.slices = {self.slices}: with every = 0, parities are sent in every step; "
                "remove it, or set every to at least as many"
            )
        if self.persist and not self.every:
            raise UserError(
                "recovery.options.persist = true: with every = 0 there are no snapshots to write; set every "
                "to 1 or more"
            )
        return SnapshotSchedule(self.every, self.slices, self.persist)
