"""One recovery: its moments, and what lies between them.

    fault ──notice──▶ lost ──decide──▶ formed ──relink, transfer, rebuild──▶ linked ──redo──▶ finished

The five moments are read off the controller's log and the workers' spans, which share one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SENT_AWAY = "sent away"
"""the cause by which a worker is missing that was told to leave, as nothing that its replica said was of use"""
Outcome = Literal[
    "recovered", "rolled back", "recalled", "relinked", "handed over", "skipping", "cannot", "disbanded", "unfinished"
]


@dataclass(frozen=True)
class RecoveryTiming:
    """One recovery: from a member's death (or a broken edge) to the first microbatch that is through again.

    Moments (``*_t``) are monotonic seconds, None where the log does not tell or the recovery did not get there. Deaths
    during a recovery belong to it; moments after the decision are then those of its last formation.
    """

    step: int
    """step under way when the loss was noticed; of several replicas, the replica's own count"""
    nodes: tuple[int, ...]
    """nodes whose worker was lost; if the outcome is 'relinked', those at the broken edges"""
    where: str
    """the nodes by name"""
    stages: tuple[int, ...]
    """the stage of each of them"""
    workers: tuple[str, ...]
    posts: tuple[int, ...]
    """the stage that each of the workers held"""
    causes: tuple[str, ...]
    """why each of the workers is missing: how its death was noticed, or SENT_AWAY"""
    outcome: Outcome
    generation: int | None
    resumed_step: int | None
    """step the replica went on from"""
    replica: int
    heirs: dict[int, str]
    """lost node → worker that stands there afterwards"""
    attempts: int
    """formations it took"""
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
        """Workers that died; those that were sent away did not."""
        return sum(cause != SENT_AWAY for cause in self.causes)

    @property
    def notice(self) -> float | None:
        """Seconds from the injected fault to its notice; None when nobody wrote down the fault."""
        return _between(self.fault_t, self.lost_t)

    @property
    def decide(self) -> float | None:
        """Seconds from the notice to the (last) formation, including the wait for a worker."""
        return _between(self.lost_t, self.formed_t)

    @property
    def redo(self) -> float | None:
        """Seconds from the last member's link to the end of the first microbatch."""
        return _between(self.linked_t, self.finished_t)

    @property
    def parts(self) -> dict[str, float | None]:
        """Where the time went, in order. Members work side by side, so the parts may come to more than the whole."""
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
        """Seconds from the fault (its notice, if the fault is unknown) to the end of the first microbatch."""
        return _between(self.lost_t if self.fault_t is None else self.fault_t, self.finished_t)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
