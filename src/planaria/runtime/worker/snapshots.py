"""Snapshots of a run in the memory of its machines: a thread of each worker writes files that outlive the worker.

:mod:`planaria.runtime.preparation.snapshot_recall` reads them when the run is resumed.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from planaria.control.facts.run_started import SnapshotLabel
from planaria.runtime.checkpoint.memory_folder import MemoryFolder
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.recovery_copies import SnapshotPart, StageCopies
from planaria.runtime.worker.setup import Setup

log = logging.getLogger(__name__)


def memory_of(run: ResolvedRun, folder: Path) -> MemoryFolder | None:
    """Return where the run's snapshots outlive its workers, or None if the recipe does not ask for them."""
    retaining = run.recovery.retaining
    return MemoryFolder(folder) if retaining is not None and retaining[1].persist else None


def snapshot_writer(setup: Setup, run: ResolvedRun) -> SnapshotWriter | None:
    """Return the writer of a worker's snapshots, or None if they do not outlive it."""
    folder = memory_of(run, setup.folder)
    return None if folder is None else SnapshotWriter(folder, setup.part)


class SnapshotWriter:
    """Writes a worker's snapshots. A snapshot is skipped if the next one is ready first.

    Without memory, it logs the failure, and earlier snapshots stay.
    """

    def __init__(self, folder: MemoryFolder, part: str) -> None:
        """``part``: the name of this part of the run."""
        self._folder, self._run_part = folder, part
        self._pending: tuple[SnapshotLabel, SnapshotPart] | None = None
        self._changed = threading.Condition()
        self._last_queued = -1, -1
        """node and step of the last snapshot handed to the thread"""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="snapshots", daemon=True)
        self._thread.start()

    def write_again(self) -> None:
        """Write the retained snapshot again under the new generation, for workers that have joined since."""
        self._last_queued = -1, -1

    def write_new(self, copies: StageCopies, generation: int) -> None:
        """Write the retained snapshot if it is new. Call it after each commit of this generation."""
        newest = copies.node, copies.retained
        if copies.retained < 0 or newest == self._last_queued:
            return
        self._last_queued = newest
        with self._changed:
            label = SnapshotLabel(part=self._run_part, generation=generation, step=copies.retained)
            self._pending = label, copies.export_snapshot()
            self._changed.notify()

    def close(self) -> None:
        """Finish the write in progress and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._pending is not None)
                snapshot, self._pending = self._pending, None
            if self._closed or snapshot is None:
                return
            label, part = snapshot
            try:
                self._folder.write(part.stage, label, part.state, part.parities)
            except OSError as error:
                log.warning("snapshot of step %d not written: %s", label.step, error)
