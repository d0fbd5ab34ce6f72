"""Moments and durations of one recovery.

    fault ──notice──▶ lost ──decide──▶ formed ──relink, transfer, rebuild──▶ linked ──redo──▶ finished

The moments come from the controller's log and the workers' spans, which share one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EXCLUDED = "excluded"
"""cause of workers that were excluded because their replica's updates were invalid"""
Outcome = Literal[
    "recovered", "rolled back", "recalled", "relinked", "handed over", "skipping", "cannot", "disbanded", "unfinished"
]


@dataclass(frozen=True)
class RecoveryTiming:
    """One recovery: from a member's death (or a broken edge) to the next completed microbatch.

    Moments (``*_t``) are monotonic seconds, None if unknown or not reached. Deaths during a recovery belong to it; its
    moments after the decision are those of its last formation.
    """

    step: int
    """step at which the loss was noticed, by the replica's own count"""
    nodes: tuple[int, ...]
    """nodes whose worker was lost; for 'relinked', those at the broken edges"""
    where: str
    """names of the nodes"""
    stages: tuple[int, ...]
    """stage of each node"""
    workers: tuple[str, ...]
    stage_of_worker: tuple[int, ...]
    """stage of each lost worker"""
    causes: tuple[str, ...]
    """how each worker's death was noticed, or EXCLUDED"""
    outcome: Outcome
    generation: int | None
    resumed_step: int | None
    """step from which the replica continued"""
    replica: int
    new_workers: dict[int, str]
    """lost node → its new worker"""
    attempts: int
    """number of formations"""
    fault_t: float | None
    lost_t: float
    formed_t: float | None
    linked_t: float | None
    finished_t: float | None
    relink: float
    """longest link_s of a member, seconds"""
    transfer: float
    """longest transfer_s of a member, seconds"""
    rebuild: float
    """longest rebuild_s of a member, seconds"""
    transfer_bytes: int

    @property
    def deaths(self) -> int:
        """Number of workers that died; excluded ones do not count."""
        return sum(cause != EXCLUDED for cause in self.causes)

    @property
    def notice(self) -> float | None:
        """Seconds from the injected fault to its detection, or None if the fault was not logged."""
        return _between(self.fault_t, self.lost_t)

    @property
    def decide(self) -> float | None:
        """Seconds from the detection to the last formation, including the wait for a worker."""
        return _between(self.lost_t, self.formed_t)

    @property
    def redo(self) -> float | None:
        """Seconds from the last member's link to the end of the first microbatch."""
        return _between(self.linked_t, self.finished_t)

    @property
    def parts(self) -> dict[str, float | None]:
        """Seconds by phase, in order. Members work in parallel, so the sum may exceed the total."""
        return {
            "notice": self.notice,
            "decide": self.decide,
            "relink": self.relink,
            "transfer": self.transfer,
            "rebuild": self.rebuild,
            "redo": self.redo,
        }

    @property
    def total(self) -> float | None:
        """Seconds from the fault (its detection, if unknown) to the end of the first microbatch."""
        return _between(self.lost_t if self.fault_t is None else self.fault_t, self.finished_t)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
