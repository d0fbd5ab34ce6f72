"""Snapshots of a run in the memory of its machines: written during training, and read on resumption.

A worker's thread writes its part to files that outlive the worker.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

from planaria.common.errors import UserError
from planaria.common.stdio import Notify
from planaria.config.schema import RunConfig
from planaria.control.logs import SurvivingSteps, turns_of
from planaria.control.run_started import RunStarted, SnapshotLabel
from planaria.recovery.base import DamagedReplica
from planaria.runtime.checkpoint.memory_folder import MemoryFolder, Owner, remove_orphaned, require_room
from planaria.runtime.checkpoint.store import SealedCheckpoint
from planaria.runtime.engine.resolved_config import ResolvedRun
from planaria.runtime.engine.run_start import Origin
from planaria.runtime.prediction.copy_costs import costs_of_copies
from planaria.runtime.worker.recovery_copies import SnapshotPart, StageCopies
from planaria.runtime.worker.setup import Setup

log = logging.getLogger(__name__)


def memory_of(run: ResolvedRun, folder: Path) -> MemoryFolder | None:
    """Return where the run's snapshots outlive its workers; None if the recipe does not ask for them."""
    retaining = run.recovery.retaining
    return MemoryFolder(folder) if retaining is not None and retaining[1].outlive else None


def prepare_memory(run: ResolvedRun, folder: Path, started: RunStarted) -> MemoryFolder | None:
    """Reserve memory for snapshots, and remove snapshots of other runs; UserError if there is too little memory."""
    remove_orphaned()
    memory = memory_of(run, folder)
    if memory is None:
        MemoryFolder(folder).remove()
        return None
    memory.begin(run.config, started)
    require_room(sum(cost.host_memory for _, cost in costs_of_copies(run)))
    return memory


def snapshot_writer(setup: Setup, run: ResolvedRun) -> SnapshotWriter | None:
    """Return the writer of a worker's snapshots; None if they do not outlive it."""
    folder = memory_of(run, setup.folder)
    return None if folder is None else SnapshotWriter(folder, setup.part)


class SnapshotWriter:
    """Writes a worker's snapshots. A snapshot is skipped if the next one is ready first.

    Without memory, it logs the failure, and earlier snapshots stay.
    """

    def __init__(self, folder: MemoryFolder, part: str) -> None:
        """``part``: the name of this part of the run."""
        self._folder, self._run_part = folder, part
        self._wanted: tuple[SnapshotLabel, SnapshotPart] | None = None
        self._news = threading.Condition()
        self._written = -1, -1
        """node and step of the last snapshot handed to the thread"""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="snapshots", daemon=True)
        self._thread.start()

    def rolled_back(self) -> None:
        """Write the retained snapshot again under the new generation, for workers that have joined since."""
        self._written = -1, -1

    def write_new(self, copies: StageCopies, generation: int) -> None:
        """Write the retained snapshot if it is new. Call it after each commit of this generation."""
        newest = copies.node, copies.retained
        if copies.retained < 0 or newest == self._written:
            return
        self._written = newest
        with self._news:
            label = SnapshotLabel(part=self._run_part, generation=generation, step=copies.retained)
            self._wanted = label, copies.remembered()
            self._news.notify()

    def close(self) -> None:
        """Finish the write in progress and stop."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._wanted is not None)
                wanted, self._wanted = self._wanted, None
            if self._closed or wanted is None:
                return
            label, part = wanted
            try:
                self._folder.write(part.stage, label, part.state, part.parities)
            except OSError as error:
                log.warning("snapshot of step %d not written: %s", label.step, error)


SAME = ("seed", "model", "data", "pipeline", "routing", "recovery", "exchange")
"""settings that a snapshot's run must share"""


def recall_point(
    origin: Origin, saved: SealedCheckpoint | None, run: ResolvedRun, folder: Path, notify: Notify
) -> Origin:
    """Return where a run continues if a snapshot in memory is newer than the checkpoint of ``origin``.

    Uses the newest snapshot that the run has not rolled back since and that covers all stages, from files or parities.
    Reports each snapshot that cannot be used.
    """
    memory = memory_of(run, folder)
    owner = None if memory is None else memory.owner()
    if memory is None or owner is None:
        if memory is not None and memory.folder.exists():
            notify(f"{memory.folder}: not used, it is damaged, or other users can access it")
        return origin
    if why := _obstacle(owner, memory, saved, origin, run.config):
        notify(f"{memory.folder}: not used, {why}")
        return origin
    nodes, strategy, stages = run.arrangement, run.recovery.snapshot_strategy, range(run.config.pipeline.stages + 1)
    newer = [label for label in memory.newest_first() if label.step > origin.step]
    try:
        surviving = SurvivingSteps.of(turns_of(folder) if newer else ())
    except UserError as error:
        notify(f"{memory.folder}: not used, the run's log does not show which steps were undone ({error})")
        return origin
    for label in newer:
        step = label.step
        if not surviving.has(label):
            notify(f"{memory.folder}: snapshot of step {step} not used, the run was rolled back since")
            continue
        there = memory.whole(label)
        lost = frozenset(stages) - there
        answer = strategy.donors(lost, DamagedReplica(run.config.pipeline.stages, dict.fromkeys(stages, 0), there))
        if answer.refused:
            notify(f"{memory.folder}: snapshot of step {step} not used, {next(iter(answer.refused.values()))}")
            continue
        of = f"stages {sorted(lost)} from the others' parities" if lost else "each stage its own"
        notify(
            f"{folder}: continues from step {step}, which is in memory ({of}); the newest checkpoint is {_named(saved)}"
        )
        return replace(
            origin,
            step=step,
            samples=owner.started.samples_before(step),
            faults_injected=False,
            recalled=label,
            snapshot_nodes=[nodes.nodes(stage)[0] for stage in sorted(there)],
            durable_step=origin.step,
        )
    return origin


def _obstacle(
    owner: Owner, memory: MemoryFolder, saved: SealedCheckpoint | None, origin: Origin, config: RunConfig
) -> str:
    """Return why snapshots cannot be used; empty if they can."""
    if owner.folder != str(memory.run):
        return f"it belongs to the run in {owner.folder}"
    if other := [name for name in SAME if getattr(owner.config, name) != getattr(config, name)]:
        return f"its {', '.join(other)} differ"
    if config.engine != "fleet":
        return "only engine 'fleet' can use it"
    if saved is not None and not saved.whole:
        return f"{saved.folder.name} holds what survived of a later step"
    samples = origin.samples if origin.samples is not None else origin.step * config.samples
    if owner.started.samples_before(origin.step) != samples:
        return "its steps used other samples than those before the checkpoint"
    return ""


def _named(saved: SealedCheckpoint | None) -> str:
    return "none" if saved is None else f"of step {saved.step}"
