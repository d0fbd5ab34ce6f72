"""The standby that a run's supervisor keeps (``fleet.standby = "auto"``)."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from planaria.common.errors import exit_code
from planaria.common.signals import describe_exit
from planaria.runtime.fleet.process import WorkerProcess, activity, outlive_parent

log = logging.getLogger(__name__)
_END_S = 5.0
"""limit for the standby to exit once asked"""
_MIN_UPTIME_S = 10.0
"""a standby that ends earlier counts as failed"""
_MAX_FAILURES = 3
"""consecutive failures after which no other standby is started"""
_PAUSE_S = 1.0
"""seconds before a failed start is repeated"""
_MAX_STOPPED_S = 2.0
"""seconds after which a stopped standby (SIGSTOP) is replaced"""


class StandbyProcess:
    """Keeps one standby waiting: starts another one if it ends, is stopped, or leads the run."""

    def __init__(self, spawn: Callable[[], WorkerProcess]) -> None:
        self._spawn = spawn
        self._waiting: WorkerProcess | None = None
        self._former: list[WorkerProcess] = []
        """standbys that have led the run, until they end"""
        self._started, self._failures, self._next = 0.0, 0, 0.0
        self._stopped_since: float | None = None

    @property
    def is_kept(self) -> bool:
        """False once no other standby is started."""
        return self._failures <= _MAX_FAILURES

    def look(self, leader: int) -> None:
        """Replace a standby that has ended, was stopped, or leads; call this repeatedly.

        :param leader: process that leads the run; 0: none does
        """
        self._former = [process for process in self._former if process.exitcode is None]
        if (waiting := self._waiting) is not None:
            if waiting.pid == leader and leader:
                self._former.append(waiting)
                self._waiting, self._failures = None, 0
            elif waiting.exitcode is not None or waiting.failure:
                self._waiting = None
                self._count_failure(waiting.failure or describe_exit(waiting.exitcode or 0))
            elif self._is_stopped(waiting):
                waiting.kill(1.0)
                self._waiting, self._stopped_since = None, None
                log.warning("the standby was stopped (SIGSTOP); starting another")
        if self._waiting is None and self.is_kept and time.monotonic() >= self._next:
            self._start()

    def close(self, leader: int) -> None:
        """End the waiting standby, unless it has become the ``leader`` since the last look."""
        if self._waiting is not None and self._waiting.pid != leader:
            self._waiting.signal(signal.SIGTERM)
            self._waiting.join(_END_S)
            self._waiting.kill(1.0)

    def _is_stopped(self, waiting: WorkerProcess) -> bool:
        """Return whether the standby has been stopped for too long to replace a lost controller."""
        now = time.monotonic()
        if activity(waiting.pid) != "stopped":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        return self._stopped_since is not None and now - self._stopped_since > _MAX_STOPPED_S

    def _start(self) -> None:
        self._started = time.monotonic()
        try:
            self._waiting = self._spawn()
        except OSError as error:
            self._count_failure(str(error))

    def _count_failure(self, how: str) -> None:
        now = time.monotonic()
        self._failures = self._failures + 1 if now - self._started < _MIN_UPTIME_S else 1
        self._next = now + _PAUSE_S * (self._failures - 1)
        if self.is_kept:
            log.warning("the standby ended (%s); starting another", how)
        else:
            log.warning("the standby ended (%s), as did those before it; the run continues without a standby", how)


def stand_by_process(folder: Path, progress: bool) -> None:
    """Entry point of the standby."""
    outlive_parent()
    local = import_module("planaria.runtime.standby.local_standby")  # it imports this module's users
    sys.exit(exit_code(partial(local.main, folder, progress)))
