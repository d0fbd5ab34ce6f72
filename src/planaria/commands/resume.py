"""``planaria train --resume``: continue a run from its newest checkpoint, or from an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from planaria import digests, documents, recipe
from planaria.checkpoint.loading import check_stages
from planaria.checkpoint.store import CheckpointStore, Saved, read_manifest
from planaria.commands import runs
from planaria.commands.branch import branch_off, starting_weights
from planaria.commands.schedule import on_schedule
from planaria.commands.train import MODEL, Prepared, conclude, prepare_run, train_prepared
from planaria.config import ChaosConfig, RunConfig
from planaria.data.shards import Meta
from planaria.engine.itinerary import Itinerary
from planaria.engine.origin import Origin
from planaria.errors import UserError
from planaria.record.reserve import Reserve
from planaria.record.statefile import read_state

FIXED = ("seed", "model", "pipeline", "routing", "data", "network")
"""what cannot change without making it another run"""


def resume(folder: Path, flags: Mapping[str, str], quiet: bool, checkpoint: str | None = None) -> int:
    """Train on where a run stopped, or from the named checkpoint of it; the exit code."""
    config = _with_flags(runs.config_of(folder, *runs.KEPT), flags, folder)
    store = CheckpointStore(folder / "checkpoints")
    saved = _choose(store, checkpoint)
    origin = _origin(store, folder, saved, config)
    for stage, name in origin.load.items():
        _check_fits(store.folder / name, stage, config)
    unexported = saved is not None and saved.whole and not (folder / MODEL).exists()
    if origin.step >= config.train.steps and unexported and not flags:
        with runs.held(folder):  # it was killed between its last step and its export
            Reserve(folder).release()
            conclude(config, folder)
        return 0
    if origin.step >= config.train.steps:
        raise UserError(
            f"{folder}: all {config.train.steps} steps are done; give more with --train.steps {2 * config.train.steps}"
        )
    prepared = prepare_run(config, quiet)
    _check_same_data(folder, prepared)
    parent = starting_weights(config, prepared.dataset) if saved is None else None
    with runs.held(folder):
        store.discard_unfinished()
        if saved is not None:
            store.set_aside_after(saved)
        if parent is not None:
            origin = replace(branch_off(parent, folder, config), generation=origin.generation)
        return train_prepared(prepared, folder, origin, quiet)


def _with_flags(before: RunConfig, flags: Mapping[str, str], folder: Path) -> RunConfig:
    """The run's own configuration with flags laid over it, unless they would make it another run."""
    config = recipe.overlay(before, flags)
    for name in FIXED:
        if getattr(config, name) != getattr(before, name):
            flag = next(f for f in flags if f.partition(".")[0] == name)
            raise UserError(f"--{flag} {flags[flag]}: cannot change when {folder} is resumed; start a new run for that")
    ours, theirs = config.exchange, before.exchange
    for name in ("kind", "momentum", "fragments"):
        if ours.replicas == theirs.replicas > 1 and getattr(ours, name) != getattr(theirs, name):
            raise UserError(
                f"--exchange.{name} {flags[f'exchange.{name}']}: what replicas keep from round to round is of "
                f"exchange.{name} = {getattr(theirs, name)!r}; start a new run, or change exchange.replicas too"
            )
    if config.engine == "simulate":
        raise UserError("--engine simulate: a simulation has nothing to resume; see `planaria plan`")
    if config.routing.schedule is not None:  # the folder may have been moved
        config = on_schedule(config, (folder / runs.SCHEDULE).absolute())
    if "chaos.trace" not in flags and config.chaos.trace is not None:
        return config.model_copy(update={"chaos": ChaosConfig(trace=str(folder / runs.TRACE))})
    return config


def _check_fits(checkpoint: Path, stage: int, config: RunConfig) -> None:
    """A checkpoint that cannot be loaded is to be found out before any worker starts."""
    manifest = read_manifest(checkpoint)
    if (manifest.model, manifest.pipeline_stages) != (config.model, config.pipeline.stages):
        raise UserError(f"{checkpoint}: was written by a model of another shape; choose another with --checkpoint")
    check_stages(checkpoint, manifest, stage)


def _check_same_data(folder: Path, prepared: Prepared) -> None:
    """Other text or another tokenizer would give every id and every sample another meaning."""
    kept = folder / runs.DATA
    if not kept.is_file():
        return
    mend = f"bring it back, or remove it and accept that with `planaria accept {folder}`"
    was, now = documents.model(kept, Meta, mend=mend), prepared.dataset.meta
    if (was.tokenizer, was.train, was.validation) != (now.tokenizer, now.train, now.validation):
        raise UserError(
            f"{folder}: the text of data.source = {prepared.config.data.source!r}, or its tokenizer, is not what this "
            "run began with; bring the old text back, or start a new run"
        )


def _check_even(saved: Saved, config: RunConfig, apart: int) -> None:
    """Replicas that step together cannot take up where some were ahead of others: samples would be used twice."""
    manifest, block = saved.manifest, config.pipeline.samples
    ragged = manifest.first_block is not None and manifest.first_block * block != manifest.samples
    on_the_fleet = config.engine == "fleet" and (apart > 1 or config.exchange.replicas == 1)
    if (ragged or manifest.blocks_ahead) and not on_the_fleet:
        raise UserError(
            f"{saved.folder}: its replicas were not all at one step, so they cannot go on step by step together; "
            "resume with --engine fleet and an exchange.kind other than 'allreduce'"
        )


def _choose(store: CheckpointStore, name: str | None) -> Saved | None:
    if name is None:
        return store.newest()
    known = {saved.folder.name: saved for saved in store.list()}
    if name not in known:
        raise UserError(f"--checkpoint {name}: no such checkpoint; there are: {', '.join(known) or 'none'}")
    return known[name]


def _generation(folder: Path, saved: Saved | None, config: RunConfig) -> int:
    """The run's last generation; 0 if it was never led by a controller.

    :raises UserError: when its state file is damaged, or is gone: this part's workers could be taken for earlier ones.
    """
    path = folder / "state.json"
    if saved is not None and config.engine == runs.config_of(folder).engine == "fleet" and not path.exists():
        raise UserError(f"{path}: is gone; bring it back, or go on with --engine inline")
    return read_state(folder).generation if path.exists() else 0


def _origin(store: CheckpointStore, folder: Path, saved: Saved | None, config: RunConfig) -> Origin:
    """Where to take up; stages that a partial checkpoint lacks come from the newest whole one before it."""
    generation = _generation(folder, saved, config)
    if saved is None:
        print(f"{folder}: nothing was saved yet; starting again from step 0")
        return Origin(generation=generation)
    if not saved.manifest.digests or not digests.read(folder):
        print(f"{folder}: an older planaria wrote it, without digests; what is damaged may go unnoticed")
    load = dict.fromkeys(saved.manifest.stages, saved.folder.name)
    missing = sorted(set(range(saved.manifest.pipeline_stages + 1)) - set(saved.manifest.stages))
    whole = next((s for s in reversed(store.list()) if s.whole and s.step <= saved.step), None)
    if missing and whole is not None:
        load |= dict.fromkeys(missing, whole.folder.name)
    if missing:
        stand_in = f"their state of step {whole.step}" if whole else "the seed's initial weights"
        print(f"{saved.folder.name}: stages {missing} were lost; they go on from {stand_in}")
    manifest, apart = saved.manifest, Itinerary(config, together=config.engine == "inline").replicas
    _check_even(saved, config, apart)
    if config.exchange.replicas != manifest.replicas:
        was, now = (f"{n} replica{'s' * (n > 1)}" for n in (manifest.replicas, config.exchange.replicas))
        what = "the one model, their mean, with fresh moments" if manifest.replicas > 1 else "copies of its one"
        print(f"{saved.folder.name}: of {was}, now {now}: they begin from {what}, and with a fresh outer state")
    return Origin(
        saved.step,
        generation,
        load,
        manifest.samples,
        struck=not saved.whole,
        first_block=manifest.first_block,
        blocks_ahead=manifest.blocks_ahead,
        standings=manifest.standings if apart == manifest.replicas > 1 else {},
    )
