"""Where a run goes on: where it stopped, or at an earlier checkpoint of it; and what forbids that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from planaria import digests, documents, recipe
from planaria.checkpoint.loading import check_stages, replicas_in
from planaria.checkpoint.store import CheckpointStore, Saved, read_manifest
from planaria.config import ChaosConfig, ExchangeConfig, RunConfig
from planaria.data.shards import Meta
from planaria.engine import runs
from planaria.engine.itinerary import Itinerary
from planaria.engine.origin import Origin
from planaria.engine.prepare import Prepared, on_schedule
from planaria.errors import UserError
from planaria.exchange import exchange
from planaria.record.statefile import read_state

FIXED = ("seed", "model", "pipeline", "routing", "data", "network")
"""what cannot change without making it another run"""


Say = Callable[[str], None]


@dataclass(frozen=True)
class Resumption:
    """A stopped run's configuration, and where it goes on."""

    config: RunConfig
    store: CheckpointStore
    saved: Saved | None
    """the checkpoint; None if nothing was saved yet"""
    origin: Origin

    @property
    def done(self) -> bool:
        """Are there no steps left?"""
        return self.origin.step >= self.config.train.steps


def take_up(folder: Path, changes: Mapping[str, object], checkpoint: str | None, say: Say) -> Resumption:
    """Look where the run in ``folder`` goes on, with ``changes`` (setting → value) laid over its own configuration.

    ``checkpoint`` names one that is not the newest. ``say`` hears what is not as one would expect.

    :raises UserError: when there is no such run or checkpoint, it is damaged, or the changes make it another run.
    """
    config = changed(runs.config_of(folder, *runs.KEPT), changes, folder)
    store = CheckpointStore(folder / "checkpoints")
    saved = _choose(store, checkpoint)
    origin = _origin(store, folder, saved, config, say)
    for stage, name in origin.load.items():
        _check_fits(store.folder / name, stage, config)
    return Resumption(config, store, saved, origin)


def changed(before: RunConfig, flags: Mapping[str, object], folder: Path) -> RunConfig:
    """The run's own configuration with flags laid over it; UserError where they would make it another run."""
    config = recipe.overlay(before, flags)
    for name in FIXED:
        if getattr(config, name) != getattr(before, name):
            flag = next(f for f in flags if f.partition(".")[0] == name)
            raise UserError(f"--{flag} {flags[flag]}: cannot change when {folder} is resumed; start a new run for that")
    if config.exchange.replicas == before.exchange.replicas > 1:
        _require_lasting(config.exchange, before.exchange)
    if config.engine == "simulate":
        raise UserError("--engine simulate: a simulation has nothing to resume; see `planaria plan`")
    if config.routing.schedule is not None:  # the folder may have been moved
        config = on_schedule(config, (folder / runs.SCHEDULE).absolute())
    if "chaos.trace" not in flags and config.chaos.trace is not None:
        return config.model_copy(update={"chaos": ChaosConfig(trace=str(folder / runs.TRACE))})
    return config


def _require_lasting(ours: ExchangeConfig, theirs: ExchangeConfig) -> None:
    """What replicas keep from round to round goes on only with the exchange that it is of."""
    made, kept = exchange(ours), exchange(theirs)
    options = kept.lasting if type(made) is type(kept) else ()
    pairs = {"kind": (ours.kind, theirs.kind)}
    pairs |= {f"options.{name}": (getattr(made, name), getattr(kept, name)) for name in options}
    for name, (now, was) in pairs.items():
        if now != was:
            raise UserError(
                f"--exchange.{name} {now}: what replicas keep from round to round is of exchange.{name} = {was!r}; "
                "start a new run, or change exchange.replicas too"
            )


def _check_fits(checkpoint: Path, stage: int, config: RunConfig) -> None:
    """A checkpoint that cannot be loaded is to be found out before any worker starts."""
    manifest = read_manifest(checkpoint)
    if (manifest.model, manifest.pipeline_stages) != (config.model, config.pipeline.stages):
        raise UserError(f"{checkpoint}: was written by a model of another shape; choose another with --checkpoint")
    check_stages(checkpoint, manifest, stage)


def require_same_data(folder: Path, prepared: Prepared) -> None:
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


def _origin(store: CheckpointStore, folder: Path, saved: Saved | None, config: RunConfig, say: Say) -> Origin:
    """Where to take up; stages that a partial checkpoint lacks come from the newest whole one before it."""
    generation = _generation(folder, saved, config)
    if saved is None:
        say(f"{folder}: nothing was saved yet; starting again from step 0")
        return Origin(generation=generation)
    if not saved.manifest.digests or not digests.read(folder):
        say(f"{folder}: an older planaria wrote it, without digests; what is damaged may go unnoticed")
    load = dict.fromkeys(saved.manifest.stages, saved.folder.name)
    missing = sorted(set(range(saved.manifest.pipeline_stages + 1)) - set(saved.manifest.stages))
    whole = next((s for s in reversed(store.list()) if s.whole and s.step <= saved.step), None)
    if missing and whole is not None:
        load |= dict.fromkeys(missing, whole.folder.name)
    if missing:
        stand_in = f"their state of step {whole.step}" if whole else "the seed's initial weights"
        say(f"{saved.folder.name}: stages {missing} were lost; they go on from {stand_in}")
    manifest, apart = saved.manifest, Itinerary(config, together=config.engine == "inline").replicas
    _check_even(saved, config, apart)
    if config.exchange.replicas != replicas_in(manifest):
        was, now = (f"{n} replica{'s' * (n > 1)}" for n in (manifest.replicas, config.exchange.replicas))
        what = "the one model, their mean, with fresh moments" if manifest.replicas > 1 else "copies of its one"
        say(f"{saved.folder.name}: of {was}, now {now}: they begin from {what}, and with a fresh outer state")
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
