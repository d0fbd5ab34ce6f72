"""What a worker remembers, written to files that outlive it, by a thread of its own: training does not wait."""

from __future__ import annotations

import threading
from pathlib import Path

from planaria.control.started import RunStarted, SnapshotLabel
from planaria.runtime.checkpoint.memory import MemoryFolder, require_room, sweep
from planaria.runtime.engine.copies import Keeping, Remembered
from planaria.runtime.engine.copy_costs import costs_of_copies
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.setup import Setup


def memory_of(run: ResolvedRun, folder: Path) -> MemoryFolder | None:
    """Where snapshots of the run in ``folder`` outlive its workers; None where the recipe does not ask for that."""
    retaining = run.recovery.retaining
    return MemoryFolder(folder) if retaining is not None and retaining[1].outlive else None


def prepare_memory(run: ResolvedRun, folder: Path, started: RunStarted) -> MemoryFolder | None:
    """Make room for snapshots before any worker starts, and remove what other runs have left.

    :raises UserError: when there is none.
    """
    sweep()
    memory = memory_of(run, folder)
    if memory is None:
        MemoryFolder(folder).remove()
        return None
    memory.begin(run.config, started)
    require_room(sum(cost.host_memory for _, cost in costs_of_copies(run)))
    return memory


def outliving(setup: Setup, run: ResolvedRun) -> Outliving | None:
    """What a worker writes its snapshots with, if it does."""
    folder = memory_of(run, setup.folder)
    return None if folder is None else Outliving(folder, setup.part)


class Outliving:
    """Writes each snapshot that a worker has its part of; one that is not written yet when the next comes is left out.

    If there is no room, the worker's log says so, and earlier snapshots stay.
    """

    def __init__(self, folder: MemoryFolder, part: str) -> None:
        """``part``: the name of this part of the run."""
        self._folder, self._run_part = folder, part
        self._wanted: tuple[SnapshotLabel, Remembered] | None = None
        self._news = threading.Condition()
        self._written = -1, -1
        """node and step of the last one that was handed over"""
        threading.Thread(target=self._work, name="snapshots", daemon=True).start()

    def rolled_back(self) -> None:
        """Write the retained snapshot again under the new generation, which workers that joined since share."""
        self._written = -1, -1

    def look(self, keeping: Keeping, generation: int) -> None:
        """Write the retained snapshot if it is new. Called when a step of this generation is committed."""
        newest = keeping.node, keeping.retained
        if keeping.retained < 0 or newest == self._written:
            return
        self._written = newest
        with self._news:
            label = SnapshotLabel(part=self._run_part, generation=generation, step=keeping.retained)
            self._wanted = label, keeping.remembered()
            self._news.notify()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._wanted is not None)
                wanted, self._wanted = self._wanted, None
            assert wanted is not None
            label, part = wanted
            try:
                self._folder.write(part.stage, label, part.state, part.parities)
            except OSError as error:
                print(f"snapshot of step {label.step}: {error}", flush=True)
