"""Schedule of snapshots: the step whose state all stages of a replica retain. Pure.

A snapshot has the state at the beginning of a step. It is pending while its parities are sent, and retained once the
last slice is committed; only then the previous one is discarded. Each side derives this from the steps that were begun
and committed, without messages.
"""

from __future__ import annotations

from typing import NamedTuple


class SnapshotSchedule(NamedTuple):
    """The interval of snapshots, and the number of steps over which one is sent."""

    every: int
    """steps between snapshots; 0: copies follow every commit, without rollback"""
    slices: int = 1
    persist: bool = False
    """whether snapshots are also written to files in the machine's memory, which outlive the worker"""

    @property
    def in_step(self) -> bool:
        return self.every == 0

    def steps_lost(self) -> float:
        """Return the mean number of steps that one failure costs, including half of the dropped step."""
        return 0.5 if self.in_step else self.slices + (self.every - 1) / 2 + 0.5


class SnapshotVersions(NamedTuple):
    """The steps of the retained and the pending snapshot; -1 for none."""

    retained: int = -1
    pending: int = -1
    due: bool = True
    """whether a snapshot begins with the next step whatever the interval, because a member is new"""

    def begin(self, step: int, schedule: SnapshotSchedule) -> SnapshotVersions:
        """Begin ``step``."""
        if schedule.in_step or self.pending >= 0 or not (self.due or step - self.retained >= schedule.every):
            return self
        return SnapshotVersions(self.retained, step, False)

    def completes(self, step: int, schedule: SnapshotSchedule) -> bool:
        """Whether a snapshot is retained with the commit of ``step``, possibly of the same step as the last one."""
        return schedule.in_step or (self.pending >= 0 and step + 1 - self.pending >= schedule.slices)

    def commit(self, step: int, schedule: SnapshotSchedule) -> SnapshotVersions:
        """Commit ``step``."""
        if not self.completes(step, schedule):
            return self
        return SnapshotVersions(step + 1 if schedule.in_step else self.pending, -1, False)

    def restart(self) -> SnapshotVersions:
        """Discard the pending snapshot because members are new; keep the retained one."""
        return SnapshotVersions(self.retained, -1, True)

    def slice(self, step: int) -> int:
        """Return the slice of the pending snapshot that ``step`` sends, from 0; -1 for none."""
        return step - self.pending if self.pending >= 0 else -1
