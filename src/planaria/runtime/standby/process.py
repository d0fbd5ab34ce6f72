"""The standby that a controller keeps on its own machine (``fleet.standby = "auto"``)."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from planaria.common.exit_codes import exit_code
from planaria.runtime.fleet.process import WorkerProcess, outlive_parent
from planaria.runtime.fleet.spawner import spawner

log = logging.getLogger(__name__)
_POLL_S = 0.25
"""seconds between two checks of the standby"""
_END_S = 5.0
"""limit for a standby to exit once asked"""
_MIN_UPTIME_S = 10.0
"""a standby that ends earlier counts as failed"""
_MAX_FAILURES = 3
"""consecutive failures after which no other standby is started"""


class StandbyProcess:
    """Runs a standby for this process, and starts another one if it ends."""

    def __init__(self, folder: Path, progress: bool, preload: Sequence[str]) -> None:
        """:param preload: modules of the fork server, from which the standby is forked"""
        self._folder, self._progress, self._preload = folder.absolute(), progress, preload
        self._closing = threading.Event()
        self._process = self._spawned()
        self._thread = threading.Thread(target=self._watch, name="standby", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the standby."""
        self._closing.set()
        self._thread.join()
        self._process.signal(signal.SIGTERM)
        self._process.join(_END_S)
        self._process.kill(1.0)

    def _spawned(self) -> WorkerProcess:
        entry = partial(_stand_by, self._folder, self._progress)
        return spawner().spawn("planaria standby", entry, self._preload)

    def _watch(self) -> None:
        """Replace standbys that end, until the run does."""
        failures, began = 0, time.monotonic()
        while not self._closing.wait(_POLL_S):
            if (code := self._process.exitcode) is None and not self._process.failure:
                continue
            failures = failures + 1 if time.monotonic() - began < _MIN_UPTIME_S else 1
            how = self._process.failure or f"exit code {code}"
            if failures > _MAX_FAILURES:
                log.warning("the standby ended (%s), as did those before it; the run continues without a standby", how)
                return
            log.warning("the standby ended (%s); starting another", how)
            began = time.monotonic()
            try:
                self._process = self._spawned()
            except OSError as error:
                log.warning("no standby can be started (%s)", error)


def _stand_by(folder: Path, progress: bool) -> None:
    """Entry point of the standby."""
    outlive_parent()
    local = import_module("planaria.runtime.standby.local")  # it imports this module's users
    sys.exit(exit_code(partial(local.main, folder, progress)))
