"""Snapshots of a run in the memory of its machines: written beside training, and read when the run is resumed.

A worker hands over what it remembers to a thread, which writes it to files that outlive the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.logs import Surviving, turns_of
from planaria.control.started import RunStarted, SnapshotLabel
from planaria.recovery.base import Replica
from planaria.runtime.checkpoint.memory import MemoryFolder, require_room, sweep
from planaria.runtime.checkpoint.memory import Remembered as Owner
from planaria.runtime.checkpoint.store import Saved
from planaria.runtime.engine.copies import Keeping, Remembered
from planaria.runtime.engine.copy_costs import costs_of_copies
from planaria.runtime.engine.origin import Origin
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
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="snapshots", daemon=True)
        self._thread.start()

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
                print(f"snapshot of step {label.step}: {error}", flush=True)


SAME = ("seed", "model", "data", "pipeline", "routing", "recovery", "exchange")
"""what a snapshot in memory cannot be taken up without"""

Say = Callable[[str], None]


def recalled(origin: Origin, saved: Saved | None, run: ResolvedRun, folder: Path, say: Say) -> Origin:
    """Return where a run continues if a snapshot in memory is newer than the checkpoint of ``origin``.

    The newest snapshot counts that the run has not undone since, and of which there is enough for all stages: each its
    own file, or the others' parities. A line is printed for each that cannot be used.
    """
    memory = memory_of(run, folder)
    whose = None if memory is None else memory.whose()
    if memory is None or whose is None:
        if memory is not None and memory.folder.exists():
            say(f"{memory.folder}: not used, it is damaged or not of this user alone")
        return origin
    if why := _unfit(whose, memory, saved, origin, run.config):
        say(f"{memory.folder}: not used, {why}")
        return origin
    nodes, strategy, stages = run.arrangement, run.recovery.remembering, range(run.config.pipeline.stages + 1)
    newer = [label for label in memory.newest_first() if label.step > origin.step]
    try:
        surviving = Surviving.of(turns_of(folder) if newer else ())
    except UserError as error:
        say(f"{memory.folder}: not used, the run's log does not say what was undone ({error})")
        return origin
    for label in newer:
        step = label.step
        if not surviving.has(label):
            say(f"{memory.folder}: snapshot of step {step} not used, the run went back to an earlier step since")
            continue
        there = memory.whole(label)
        lost = frozenset(stages) - there
        answer = strategy.donors(lost, Replica(run.config.pipeline.stages, dict.fromkeys(stages, 0), there))
        if answer.refused:
            say(f"{memory.folder}: snapshot of step {step} not used, {next(iter(answer.refused.values()))}")
            continue
        of = f"stages {sorted(lost)} from the others' parities" if lost else "each stage its own"
        say(f"{folder}: goes on from step {step}, which was in memory ({of}); the newest checkpoint is {_named(saved)}")
        return replace(
            origin,
            step=step,
            samples=whose.started.samples_before(step),
            struck=False,
            recalled=label,
            remembering=[nodes.nodes(stage)[0] for stage in sorted(there)],
            durable_step=origin.step,
        )
    return origin


def _unfit(whose: Owner, memory: MemoryFolder, saved: Saved | None, origin: Origin, config: RunConfig) -> str:
    """Why snapshots cannot be taken up; empty if they can."""
    if whose.folder != str(memory.run):
        return f"it is of the run in {whose.folder}"
    if other := [name for name in SAME if getattr(whose.config, name) != getattr(config, name)]:
        return f"its {', '.join(other)} was another"
    if config.engine != "fleet":
        return "only engine 'fleet' goes on from it"
    if saved is not None and not saved.whole:
        return f"{saved.folder.name} holds what survived of a later step"
    samples = origin.samples if origin.samples is not None else origin.step * config.samples
    if whose.started.samples_before(origin.step) != samples:
        return "its steps took other samples than those before the checkpoint"
    return ""


def _named(saved: Saved | None) -> str:
    return "none" if saved is None else f"of step {saved.step}"
