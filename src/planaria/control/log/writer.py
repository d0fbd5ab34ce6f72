"""Write a run's logs: every event and decision is in the log, and in the shared log, before its orders go out."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from planaria.control.facts.decisions import Decision
from planaria.control.facts.events import Event, WorkReport
from planaria.control.log.line_format import decision_line, event_line
from planaria.control.log.reader import EVENTS, METRICS, SPANS
from planaria.control.log.run_record import Metric
from planaria.control.log.segments import SEGMENT_BYTES, DiskReserve, RotatingLog

DISK_RETRY_S = 2.0
"""time in which a failed save removes its files from a full disk"""
_RETRIES = 40


class SharedHistory(Protocol):
    """The history of a run on other machines (``runtime/shared_log/leadership.py``)."""

    def add(self, line: str) -> None:
        """Add a line of the log."""

    def secure(self) -> None:
        """Wait until all lines are stored; RunStopped if that is impossible, or another controller leads."""

    def check(self) -> None:
        """Raise RunStopped if this process may no longer lead."""

    def when_lost(self, disconnect: Callable[[], object]) -> None:
        """Call ``disconnect`` in another thread once this process may not lead."""


class RunLog:
    """The logs in a run's folder, which is created if absent; a resumed run appends to them.

    The log proves which samples were used, so a run stops without it. If a line cannot be written, ``trouble`` holds
    the reason, and reserved disk space is freed for the remaining lines. Workers that save at that time may fill it
    until their saves fail, so the write is retried for ``DISK_RETRY_S``. If that does not suffice, the log ends there,
    without a gap.
    """

    def __init__(self, folder: Path, shared: SharedHistory | None = None, full: int = SEGMENT_BYTES) -> None:
        """:param shared: receives each line of the events and decisions, too
        :param full: bytes per segment; full segments are compressed
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._shared = shared
        self._events, self._spans, self._metrics = (
            RotatingLog(folder / name, full) for name in (EVENTS, SPANS, METRICS)
        )
        self._reserve = DiskReserve(folder)
        self.trouble = ""
        """why a line could not be written; empty if all were"""
        self._ended = False

    def event(self, t: float, event: Event, notice: int = 0) -> None:
        """Write an event; ``notice``: number of the supervisor's notice that reported it."""
        self._write_history(event_line(t, event, notice))

    def decision(self, t: float, decision: Decision) -> None:
        """Write a decision."""
        self._write_history(decision_line(t, decision))

    def worked(self, t: float, worked: WorkReport) -> None:
        """Write the spans of a worker's step."""
        self._write(self._spans, f'{{"t": {t!r}, "worked": {worked.model_dump_json()}}}')

    def metric(self, metric: Metric) -> None:
        """Write the metrics of a step or validation."""
        self._write(self._metrics, metric.model_dump_json())

    def close(self) -> None:
        """Close the files and free the reserved disk space."""
        for log in (self._events, self._spans, self._metrics):
            log.close()
        self._reserve.release()

    def _write_history(self, line: str) -> None:
        if self._write(self._events, line) and self._shared is not None:
            self._shared.add(line)

    def _write(self, log: RotatingLog, line: str) -> bool:
        """Write a line; return whether that succeeded."""
        if self._ended:
            return False
        try:
            log.write(line)
        except OSError as error:
            removed = error.errno == errno.ENOENT
            fix = "start the run again, and do not remove its folder" if removed else "free the disk, then resume it"
            self.trouble = self.trouble or f"{error.filename} cannot be written ({error.strerror}); {fix}"
            self._reserve.release()
            self._ended = not _retry(log, line, 0.0 if removed else DISK_RETRY_S)
        return not self._ended


def _retry(log: RotatingLog, line: str, within_s: float) -> bool:
    """Return whether the line could be written within this time."""
    until = time.monotonic() + within_s
    while True:
        try:
            log.write(line)
            return True
        except OSError:
            if time.monotonic() >= until:
                return False
            time.sleep(within_s / _RETRIES)
