"""What a run that is resumed begins from first: what its workers left in the machine's memory, if the disk is older."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.logs import Surviving, turns_of
from planaria.recovery.base import Replica
from planaria.runtime.checkpoint.memory import MemoryFolder, Remembered
from planaria.runtime.checkpoint.store import Saved
from planaria.runtime.engine.origin import Origin
from planaria.runtime.engine.outliving import memory_of
from planaria.runtime.engine.resolved import ResolvedRun

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


def _unfit(whose: Remembered, memory: MemoryFolder, saved: Saved | None, origin: Origin, config: RunConfig) -> str:
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
