"""Who has been silent for too long. Pure but for the clock, which is an argument.

Three things are no fault of those who are listened to, and none of them counts as silence:

- The listener was away (stopped, suspended, kept from its processor). Time passes here only as fast as it should pass
  between two looks; what more passed, nobody was there to hear.
- What has come meanwhile was not read yet. Whoever judges has read everything first, and judges by the time of a look
  *before* the reading.
- The machine is busy. What counts as silence grows with the longest gaps that beats have shown lately in this run, by
  whomever; and of a process of this machine the kernel tells whether it is stopped or only waits for a processor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from planaria.runtime.fleet.process import Activity
from planaria.runtime.fleet.spawner import START_S

_TIMES = 4
"""as many of the longest gaps that were shown lately are silence. Gaps have a long tail on a busy machine; of one whose
chance of being exceeded falls as the square (as it does where load comes and goes), one in sixteen windows has one"""
_LATELY_S = 60.0
_MOST_S = 30.0
"""of silence are enough for anybody who has spoken, even if it seems to be busy"""
_AWAY = 1.5
"""a look is expected after at most so many times as long as was planned, or as a heartbeat takes"""
_ABSENCE = 0.25
"""heartbeats that a later look counts for, however late: not nothing, for who always looks late must find out too"""

Who = TypeVar("Who", bound=Hashable)


class Silence(Generic[Who]):
    """Everybody who should beat, and when they were heard last."""

    def __init__(
        self,
        heartbeat_s: float,
        missed: float,
        clock: Callable[[], float] = time.monotonic,
        start_s: float = START_S,
    ) -> None:
        """On an idle machine, missing ``missed`` heartbeats of ``heartbeat_s`` is too long a silence.

        ``start_s``: limit from a worker's start, which imports and builds, to its first heartbeat.
        """
        self._heartbeat_s, self._floor_s, self._clock = heartbeat_s, heartbeat_s * missed, clock
        self._start_s = start_s
        self._looked = clock()
        self._now = 0.0
        """seconds that somebody listened, up to the last look"""
        self._back = 0.0
        """when somebody listened again after having been away: gaps from before say nothing of beats"""
        self._heard: dict[Who, float] = {}
        self._spoke: set[Who] = set()
        self._gaps: deque[tuple[float, float]] = deque()
        """(when, seconds): gaps of late, each longer than all that came after it"""

    def expect(self, who: Who) -> None:
        """From now on somebody is there who has still to say its first word."""
        self._heard[who] = self._now
        self._spoke.discard(who)

    def hear(self, who: Who) -> None:
        """Somebody said something."""
        if who in self._spoke and self._heard[who] >= self._back:
            self._note(self._now - self._heard[who])
        self._heard[who] = self._now
        self._spoke.add(who)

    def forget(self, who: Who) -> None:
        """It is gone."""
        self._heard.pop(who, None)
        self._spoke.discard(who)

    def look(self, planned_s: float = 0.0) -> None:
        """To be told after each wait, which was to end within ``planned_s``, and before what came is read."""
        now = self._clock()
        passed, most = now - self._looked, _AWAY * max(planned_s, self._heartbeat_s)
        self._looked = now
        if passed <= most:
            self._now += passed
        else:  # perhaps the whole machine stood still
            self._now += _ABSENCE * self._heartbeat_s
            self._back = self._now

    def too_long(self, doing: Callable[[Who], Activity]) -> list[tuple[Who, float]]:
        """Who has been silent for too long at the last look, and for how many seconds.

        To be asked when all that had come by then was heard. ``doing`` is asked about those alone who are late already.
        """
        late = [(who, self._now - heard) for who, heard in self._heard.items() if self._now - heard > self._floor_s]
        return [(who, silent_s) for who, silent_s in late if silent_s > self._limit_s(who, doing(who))]

    def _limit_s(self, who: Who, doing: Activity) -> float:
        if doing == "stopped":
            return self._floor_s
        if who not in self._spoke:
            return max(self._floor_s, self._start_s)
        return max(self._floor_s, _MOST_S if doing == "busy" else min(_MOST_S, _TIMES * self._longest_s()))

    def _longest_s(self) -> float:
        while self._gaps and self._gaps[0][0] < self._now - _LATELY_S:
            self._gaps.popleft()
        return self._gaps[0][1] if self._gaps else 0.0

    def _note(self, gap_s: float) -> None:
        while self._gaps and self._gaps[-1][1] <= gap_s:
            self._gaps.pop()
        self._gaps.append((self._now, gap_s))
