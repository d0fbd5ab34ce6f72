"""A run that begins from a checkpoint folder of another program, with its moments and clocks."""

from __future__ import annotations

from pathlib import Path

from planaria.api.export import Kind
from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.saving import folder_name
from planaria.models.families import family
from planaria.runtime.checkpoint.foreign import Job, Reply, read_apart
from planaria.runtime.checkpoint.stage_file import stage_file
from planaria.runtime.checkpoint.store import CheckpointStore, Manifest
from planaria.runtime.engine import runs
from planaria.runtime.engine.check import check, read_faults
from planaria.runtime.engine.resolved import ResolvedRun


def import_run(folder: Path, config: RunConfig, kind: Kind, names: Path | None = None) -> tuple[Path, list[str]]:
    """Make a run of ``config`` whose first checkpoint is what ``folder`` holds: its folder, and what to tell.

    ``names``: a file that says which tensor is which parameter, where they have not Hugging Face's names. The run's
    folder appears whole or not at all; ``planaria.train(folder, resume=True)`` goes on from there.

    :raises UserError: when the folder is damaged or does not hold the model of ``config``; nothing is made then.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder; give the checkpoint of another program")
    if config.engine == "simulate" or not family(config.model).whole:
        what = "engine = 'simulate'" if config.engine == "simulate" else f"model.family = {config.model.family!r}"
        raise UserError(f"{what}: has no weights of one model to begin from")
    if config.train.start is not None:
        raise UserError(f"train.start = {config.train.start!r}: the weights are those of {folder}; leave it out")
    resolved = check(config)
    replies: list[Reply] = []
    made = runs.create_filled(config, lambda run: replies.append(_fill(run, folder, resolved, kind, names)))
    (reply,) = replies
    counted = [] if reply.samples is not None else ["samples used are not said: counted as the recipe's of each step"]
    return made, [f"{folder}: {line}" for line in (f"step {reply.step}", *reply.said, *counted)]


def _fill(run: Path, folder: Path, resolved: ResolvedRun, kind: Kind, names: Path | None) -> Reply:
    """Put the folder's state into a run's folder, as its first checkpoint."""
    config, store = resolved.config, CheckpointStore(run / "checkpoints")
    stages = config.pipeline.stages
    parts = store.folder / "foreign.unfinished"
    job = Job(
        folder=str(folder),
        format=kind,
        names=None if names is None else str(names),
        model=config.model,
        stages=stages,
        to=str(parts),
    )
    reply = read_apart(job)
    runs.keep_plans(run, config, read_faults(resolved))
    parts.rename(store.unfinished(reply.step))
    digests = {stage_file(Path(), stage).name: sha256 for stage, sha256 in enumerate(reply.digests)}
    manifest = Manifest(
        step=reply.step,
        stages=list(range(stages + 1)),
        pipeline_stages=stages,
        samples=reply.samples,
        digests=digests,
        model=config.model,
        exchange=ExchangeConfig(),
        block=config.pipeline.samples,
    )
    store.seal(folder_name(reply.step), manifest, config.checkpoint.keep)
    return reply
