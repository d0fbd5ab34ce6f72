"""Failure detection by missing heartbeats, with the clock as an argument.

Three delays do not count as silence:

- The listener was suspended: a check that comes late advances the clock by a quarter of a heartbeat only.
- Messages were not read yet. A caller notes the time, then reads all messages, and then judges silence by that time.
- The machine is busy. The limit grows with the longest recent gap between heartbeats of any worker; for a process of
  this machine, the kernel reports whether it is stopped or waits for a processor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Self, TypeVar

from planaria.config.schema import FleetConfig
from planaria.runtime.fleet.process import Activity
from planaria.runtime.fleet.spawner import START_S

_SILENCE_GAP_FACTOR = 4
"""multiple of the longest recent gap that counts as silence. On a busy machine gaps have a heavy tail: if the chance
of a gap falls with the square of its length, 1 window in 16 has a gap 4 times the longest before
"""
_GAP_WINDOW_S = 60.0
_MAX_SILENCE_S = 30.0
"""limit (s) for any worker that has reported, even if it seems to be busy"""
_LATE_LOOK_FACTOR = 1.5
"""a check counts as late after this many planned waits or heartbeats"""
_LATE_LOOK_HEARTBEATS = 0.25
"""advance of the clock at a late check, in heartbeats; positive, so that even a monitor that is always late detects
silence
"""

Worker = TypeVar("Worker", bound=Hashable)


class HeartbeatMonitor(Generic[Worker]):
    """The monitored workers and the times of their last messages."""

    def __init__(
        self,
        heartbeat_s: float,
        missed_heartbeats: float,
        clock: Callable[[], float] = time.monotonic,
        start_s: float = START_S,
    ) -> None:
        """Missing ``missed_heartbeats`` heartbeats of ``heartbeat_s`` is too long on an idle machine.

        ``start_s``: limit from a worker's start, which imports and builds, to its first heartbeat.
        """
        self._heartbeat_s = heartbeat_s
        self._floor_s = heartbeat_s * missed_heartbeats
        self._clock = clock
        self._start_s = start_s
        self._looked = clock()
        self._now = 0.0
        """listening time (s) up to the last look"""
        self._resumed_at = 0.0
        """listening time at the last suspension; earlier gaps are ignored"""
        self._last: dict[Worker, float] = {}
        self._reported: set[Worker] = set()
        self._gaps: deque[tuple[float, float]] = deque()
        """(when, seconds) of recent gaps, each longer than all later ones"""

    @classmethod
    def of(cls, config: FleetConfig) -> Self:
        """Return the monitor of a fleet's workers."""
        return cls(config.heartbeat_s, config.missed_heartbeats, start_s=config.start_timeout_s)

    def expect(self, worker: Worker) -> None:
        """Monitor a worker that has not reported yet."""
        self._last[worker] = self._now
        self._reported.discard(worker)

    def receive(self, worker: Worker) -> None:
        """Record a message."""
        if worker in self._reported and self._last[worker] >= self._resumed_at:
            self._note(self._now - self._last[worker])
        self._last[worker] = self._now
        self._reported.add(worker)

    def forget(self, worker: Worker) -> None:
        """Stop monitoring a worker."""
        self._last.pop(worker, None)
        self._reported.discard(worker)

    def look(self, planned_s: float = 0.0) -> None:
        """Advance the clock. Call it after each wait of at most ``planned_s``, before reading messages."""
        now = self._clock()
        passed, most = now - self._looked, _LATE_LOOK_FACTOR * max(planned_s, self._heartbeat_s)
        self._looked = now
        if passed <= most:
            self._now += passed
        else:  # the whole machine may have been suspended
            self._now += _LATE_LOOK_HEARTBEATS * self._heartbeat_s
            self._resumed_at = self._now

    def silent_too_long(self, activity_of: Callable[[Worker], Activity]) -> list[tuple[Worker, float]]:
        """Return the workers silent for too long at the last look, with the seconds.

        Call it after reading all messages. ``activity_of`` is called only for workers that exceed the limit of an idle
        machine.
        """
        silent = {worker: self._now - last for worker, last in self._last.items() if self._now - last > self._floor_s}
        return [(worker, s) for worker, s in silent.items() if s > self._limit_s(worker, activity_of(worker))]

    def _limit_s(self, worker: Worker, doing: Activity) -> float:
        if doing == "stopped":
            return self._floor_s
        if worker not in self._reported:
            return max(self._floor_s, self._start_s)
        idle_s = min(_MAX_SILENCE_S, _SILENCE_GAP_FACTOR * self._longest_s())
        return max(self._floor_s, _MAX_SILENCE_S if doing == "busy" else idle_s)

    def _longest_s(self) -> float:
        while self._gaps and self._gaps[0][0] < self._now - _GAP_WINDOW_S:
            self._gaps.popleft()
        return self._gaps[0][1] if self._gaps else 0.0

    def _note(self, gap_s: float) -> None:
        while self._gaps and self._gaps[-1][1] <= gap_s:
            self._gaps.pop()
        self._gaps.append((self._now, gap_s))
