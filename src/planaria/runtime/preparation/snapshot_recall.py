"""Resumption from snapshots in the memory of a run's machines (:mod:`planaria.runtime.worker.snapshots`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planaria.common.errors import UserError
from planaria.common.stdio import Notify
from planaria.config.schema import RunConfig
from planaria.control.facts.run_started import RunStarted
from planaria.control.log.reader import SurvivingSteps, step_boundaries
from planaria.recovery.base import DamagedReplica
from planaria.runtime.checkpoint.memory_folder import MemoryFolder, Owner, remove_orphaned, require_room
from planaria.runtime.checkpoint.store import SealedCheckpoint
from planaria.runtime.prediction.copy_costs import costs_of_copies
from planaria.runtime.preparation.run_start import Origin
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.snapshots import memory_of

SAME = ("seed", "model", "data", "pipeline", "routing", "recovery", "exchange")
"""settings that a snapshot's run must share"""


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
    strategy = run.recovery.snapshot_strategy
    stages = range(run.config.pipeline.stages + 1)
    newer = [label for label in memory.newest_first() if label.step > origin.step]
    try:
        surviving = SurvivingSteps.of(step_boundaries(folder) if newer else ())
    except UserError as error:
        notify(f"{memory.folder}: not used, the run's log does not show which steps were undone ({error})")
        return origin
    for label in newer:
        unused = f"{memory.folder}: snapshot of step {label.step} not used"
        if not surviving.has(label):
            notify(f"{unused}, the run was rolled back since")
            continue
        holding = memory.whole_stages(label)
        lost = frozenset(stages) - holding
        answer = strategy.donors(lost, DamagedReplica(run.config.pipeline.stages, dict.fromkeys(stages, 0), holding))
        if answer.refused:
            notify(f"{unused}, {next(iter(answer.refused.values()))}")
            continue
        of = f"stages {sorted(lost)} from the others' parities" if lost else "each stage its own"
        newest = "none" if saved is None else f"of step {saved.step}"
        notify(
            f"{folder}: continues from step {label.step}, which is in memory ({of}); the newest checkpoint is {newest}"
        )
        return replace(
            origin,
            step=label.step,
            samples=owner.started.samples_before(label.step),
            faults_injected=False,
            recalled=label,
            snapshot_nodes=[run.arrangement.nodes(stage)[0] for stage in sorted(holding)],
            durable_step=origin.step,
        )
    return origin


def _obstacle(
    owner: Owner, memory: MemoryFolder, saved: SealedCheckpoint | None, origin: Origin, config: RunConfig
) -> str:
    """Return why snapshots cannot be used, or an empty string if they can."""
    if owner.folder != str(memory.run):
        return f"it belongs to the run in {owner.folder}"
    if differing := [name for name in SAME if getattr(owner.config, name) != getattr(config, name)]:
        return f"its {', '.join(differing)} differ"
    if config.engine != "fleet":
        return "only engine 'fleet' can use it"
    if saved is not None and not saved.whole:
        return f"{saved.folder.name} holds what survived of a later step"
    samples = origin.samples if origin.samples is not None else origin.step * config.samples
    if owner.started.samples_before(origin.step) != samples:
        return "its steps used other samples than those before the checkpoint"
    return ""
