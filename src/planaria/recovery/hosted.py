"""Base of strategies that keep one whole copy of every stage at another stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from planaria.models.state import StageState
from planaria.recovery.base import Copy, DamagedReplica, Recovery, StrategyPlan


class HostedCopy(Recovery, ABC):
    """Rebuild a lost stage from its copy; refuse if the host is lost too or its copy is incomplete.

    The copy at a host that was replaced is incomplete until :attr:`commits_needed` steps are committed. A loss of the
    host and a loss of the stage before that are as fatal as simultaneous losses.
    """

    label: ClassVar[str]
    """name of the copy in messages"""

    @abstractmethod
    def host(self, stage: int, stages: int) -> int:
        """Return the stage that holds the copy of ``stage``, of block stages 1..``stages`` and stage 0."""

    def copies(self, stages: int) -> tuple[Copy, ...]:
        return tuple(Copy((stage,), self.host(stage, stages)) for stage in range(stages + 1))

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        needed = self.commits_needed
        donors, refused = {}, {}
        for stage in sorted(lost):
            host = self.host(stage, replica.stages)
            if host in lost:
                refused[stage] = f"stage {stage}'s {self.label} was at stage {host}, which is lost too"
            elif replica.staleness[host] < needed:
                so_far = f"{replica.staleness[host]} of {needed} steps since stage {host} got a new worker"
                refused[stage] = f"stage {stage}'s {self.label} at stage {host} is incomplete ({so_far})"
            else:
                donors[stage] = (host,)
        return StrategyPlan(donors, refused)

    @property
    def commits_needed(self) -> int:
        """Commits after which a host's copy is complete."""
        return 1

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        (copy,) = kept.values()
        return copy
