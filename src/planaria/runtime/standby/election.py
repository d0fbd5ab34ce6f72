"""When a standby on another machine takes over: it copies the shared log, and stands for election if that falls silent.

The election timeout is ``fleet.lease_s`` and a random delay. The controller's lease lasts two ``fleet.lease_s``
(``runtime/shared_log/leadership.py``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from planaria.common.errors import RunStopped, UserError
from planaria.common.stdio import Notify
from planaria.config.schema import FleetConfig
from planaria.control.facts.decisions import Finish
from planaria.control.log.line_format import kind_of, parse_line
from planaria.control.log.reader import EVENTS
from planaria.control.log.segments import RotatingLog
from planaria.control.log.shared_log import BEGIN, Batch, Lease, LogAppender, SharedLog, SharedPosition

_CHECKS = 5
"""checks of the shared log in ``fleet.lease_s``"""
_PROGRESS_KINDS = "finish", "run_started", "commit"
"""kinds of lines that show whether the run had ended before"""
_JITTER = 0.15
"""maximum random part of the election timeout, as a share of ``fleet.lease_s``"""


class RunEnd:
    """The end of a run, if its shared log ends with that. A later election means that the run is being resumed."""

    def __init__(self) -> None:
        self._line, self._term = "", 0

    @classmethod
    def of(cls, log: SharedLog) -> RunEnd:
        """Return the end of a log, from its last batches."""
        batches, end = list[Batch](), cls()
        for number in range(log.newest(), 0, -1):
            if (batch := log.read(number)) is None:
                break
            batches.append(batch)
            if not batch.lines or any(kind_of(line.encode()) in _PROGRESS_KINDS for line in batch.lines):
                break
        for batch in reversed(batches):
            end.take(batch)
        return end

    def take(self, batch: Batch) -> None:
        """Take the next batch of the log."""
        if batch.term != self._term:
            self._line, self._term = "", batch.term
        for line in batch.lines:
            kind = kind_of(line.encode())
            if kind == "finish":
                self._line = line
            elif kind == "run_started":
                self._line = ""

    @property
    def finish(self) -> Finish | None:
        """How the run ended, or None if it continues."""
        fact = parse_line(self._line.encode()).fact if self._line else None
        return fact if isinstance(fact, Finish) else None


class ControllerWatch:
    """Copies a shared log into a folder until the run ends, or this machine is elected to lead it."""

    def __init__(
        self, log: SharedLog, folder: Path, fleet: FleetConfig, order: int, notify: Notify,
        copied: Callable[[], None], end: SharedPosition = BEGIN,
    ) -> None:  # fmt: skip
        """:param order: of this standby; later ones have a longer election timeout
        :param copied: called after each check
        :param end: of the part that the folder has
        """
        self.log, self._notify, self._copied = log, notify, copied
        self._lease_s, self._orphan_s = fleet.lease_s, fleet.orphan_s
        self._copy = RotatingLog(folder / EVENTS)
        self._election_timeout_s = fleet.lease_s * (1 + _JITTER * (order + random.random()))
        self._seen: Lease | None = None
        self._first = True
        """whether this process has not read the lease yet; the first one may be old"""
        self._end, self._written = end, end.lines
        self._run_end = RunEnd()
        self.silent_since = self.noticed = self._waiting_since = time.monotonic()
        """times of the controller's last sign of life, and of the notice that it is lost; monotonic seconds"""

    def follow(self, stopped: Callable[[], bool] = lambda: False) -> LogAppender | None:
        """Return once this machine leads; None if the run has ended, or once ``stopped`` is true.

        While the store does not answer, the controller cannot lead either: both wait for it.

        :raises RunStopped: if the store does not answer for ``fleet.orphan_s``.
        :raises UserError: if the log is damaged during that time.
        """
        answered = time.monotonic()
        while self.finish is None and not stopped():
            try:
                if (appender := self._take_over_if_silent()) is not None:
                    self._copy.close()
                    return appender
                answered = time.monotonic()
            except (RunStopped, UserError, OSError) as error:
                if time.monotonic() - answered > self._orphan_s:
                    raise
                if self._waiting_since <= answered:
                    self._notify(f"standby       waits for the shared log ({error})")
                self._waiting_since = time.monotonic()
            time.sleep(self._lease_s / _CHECKS)
        self._copy.close()
        return None

    @property
    def finish(self) -> Finish | None:
        """How the run ended, or None if the copied log does not end with that."""
        return self._run_end.finish

    def _take_over_if_silent(self) -> LogAppender | None:
        """Copy new lines, and stand for election after the election timeout; return the appender if elected.

        New lines and a renewed lease are signs of life of the controller.
        """
        lease = self.log.lease()
        advanced = self._advance()
        self._copied()
        if advanced or lease != self._seen:
            self._waiting_since = time.monotonic()
            self.silent_since = self._waiting_since - (_age_s(lease) if self._first else 0.0)
        self._seen, self._first = lease, False
        if self.finish is not None or time.monotonic() - self._waiting_since <= self._election_timeout_s:
            return None
        self.noticed = time.monotonic()
        appender = LogAppender.after(self._end, self.log)
        if appender.stand():
            return appender
        self.silent_since = self._waiting_since = time.monotonic()  # another one was elected
        return None

    def _advance(self) -> bool:
        """Copy new batches; return whether there were any."""
        before = self._end
        for batch in self.log.since(before.number):
            for line in batch.lines[self._written - self._end.lines :]:  # the disk may have been full within a batch
                self._copy.write(line)
                self._written += 1
            self._run_end.take(batch)
            self._end = SharedPosition(self._end.number + 1, self._end.lines + len(batch.lines), batch.term)
        return self._end != before


def _age_s(lease: Lease | None) -> float:
    """Return how long ago a lease was renewed, by the clocks of both machines; 0 if unknown."""
    return 0.0 if lease is None or not lease.at else max(0.0, time.time() - lease.at)
