"""Reports workers that take long to start while the run waits for them. Pure: times are given, in seconds."""

from __future__ import annotations

import math

from planaria.record import events as e
from planaria.record.roster import identity_order
from planaria.record.state import RunState

_FIRST_S, _MOST_S = 10.0, 60.0
"""from a worker's start to the first report, and the longest pause between two; each pause is twice the one before"""


class Starts:
    """The starts of one run's workers."""

    def __init__(self, limit_s: float) -> None:
        """``limit_s``: ``fleet.start_timeout_s``."""
        self._limit_s, self._since = limit_s, dict[str, float]()
        self.due, self._pause_s = math.inf, _FIRST_S
        """when :meth:`report` has something to report"""

    def note(self, now: float, run: RunState) -> None:
        """Take down which workers are starting."""
        starting = run.roster.starting if run.vacancies and not run.over else ()
        if self._since.keys() == set(starting):
            return
        if not self._since.keys() & set(starting):
            self.due, self._pause_s = now + _FIRST_S, _FIRST_S
        self._since = {worker: self._since.get(worker, now) for worker in starting}
        if not self._since:
            self.due = math.inf

    def report(self, now: float, run: RunState) -> e.WorkersStarting | None:
        """Return the workers that the run waits for, if a report is due."""
        if now < self.due:
            return None
        self._pause_s = min(2 * self._pause_s, _MOST_S)
        self.due = now + self._pause_s
        waited_s = now - min(self._since.values())
        names, ready = sorted(self._since, key=identity_order), len(run.spares)
        return e.WorkersStarting(workers=names, ready=ready, waited_s=waited_s, limit_s=self._limit_s)
