"""``planaria train``: from a recipe to a trained model, its report and its export."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from planaria import recipe
from planaria.chaos.trace import Trace
from planaria.chaos.trace import read as read_trace
from planaria.checkpoint.stage_file import check_stage
from planaria.checkpoint.store import CheckpointStore, Saved, read_manifest
from planaria.commands import runs
from planaria.commands.export import export_run
from planaria.commands.generate import complete
from planaria.commands.plan import describe
from planaria.config import RunConfig
from planaria.control.statefile import read_state
from planaria.data.shards import Dataset, prepare
from planaria.data.stream import Stream
from planaria.engine import fleet, inline_run
from planaria.engine.origin import START, Origin
from planaria.errors import RunStopped, UserError
from planaria.observe.logs import read_run
from planaria.observe.progress import Progress, Quiet
from planaria.observe.report import write_report
from planaria.observe.summary import summary
from planaria.observe.watch import Watch
from planaria.plan.build import plan_for
from planaria.plan.check import require
from planaria.recovery import recovery
from planaria.routing import routing

FIXED_ON_RESUME = ("seed", "model", "pipeline", "data", "network")


@dataclass(frozen=True)
class Prepared:
    """A run about which nothing is left to complain."""

    config: RunConfig
    dataset: Dataset
    trace: Trace


def start(recipe_file: Path | None, flags: Mapping[str, str], dry_run: bool, quiet: bool) -> int:
    """Train a recipe from its first step; the exit code."""
    config = recipe.load(recipe_file, flags)
    if dry_run:
        check(config)
        print(recipe.dump(config), end="")
        return 0
    if config.engine == "simulate":
        check(config)
        print(describe(config))
        return 0
    prepared = prepare_run(config, recipe_file, quiet)
    folder = runs.create(config)
    return _train(prepared, folder, START, quiet)


def resume(folder: Path, flags: Mapping[str, str], quiet: bool, checkpoint: str | None = None) -> int:
    """Train on where a run stopped, or from the named checkpoint of it; the exit code."""
    before = runs.config_of(folder)
    config = _with_flags(before, flags, folder)
    store = CheckpointStore(folder / "checkpoints")
    origin = _origin(store, folder, _choose(store, checkpoint))
    for stage, name in origin.load.items():
        _check_fits(store.folder / name, stage, config)
    if origin.step >= config.train.steps:
        raise UserError(
            f"{folder}: all {config.train.steps} steps are done; give more with --train.steps {2 * config.train.steps}"
        )
    prepared = prepare_run(config, None, quiet)
    return _train(prepared, folder, origin, quiet)


def check(config: RunConfig) -> None:
    """Everything that can be wrong with a recipe by itself, before any data is touched."""
    recovery(config.recovery)
    pipeline = config.pipeline
    require(plan_for(pipeline, routing(pipeline.routing)(pipeline.stages, pipeline.microbatches, 0)))
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device = 'cuda': this machine has no CUDA device; use 'cpu'")


def prepare_run(config: RunConfig, recipe_file: Path | None, quiet: bool) -> Prepared:
    """Check the recipe, tokenise its text, read its faults."""
    check(config)
    trace = Trace(faults=())
    if config.chaos.trace is not None:
        beside = Path(config.chaos.trace)
        if recipe_file is not None and not beside.is_absolute() and (recipe_file.parent / beside).is_file():
            beside = recipe_file.parent / beside
        trace = read_trace(beside)
        for fault in trace.faults:
            if fault.stage > config.pipeline.stages:
                last = config.pipeline.stages
                raise UserError(f"{beside}: a fault at stage {fault.stage}; this run has stages 0..{last}")
    dataset = prepare(config.data, config.model.vocab, None if quiet else print)
    Stream(dataset, "train", config.model.context, config.seed)
    if config.train.eval_every:
        Stream(dataset, "validation", config.model.context, config.seed)
    return Prepared(config, dataset, trace)


def _train(prepared: Prepared, folder: Path, origin: Origin, quiet: bool) -> int:
    config = prepared.config
    engine = fleet.train if config.engine == "fleet" else inline_run.train
    with runs.held(folder):
        runs.keep_config(folder, config)
        shutil.copyfile(prepared.dataset.tokenizer_file, folder / "tokenizer.json")
        CheckpointStore(folder / "checkpoints").discard_unfinished()
        watch = Watch(folder, config.pipeline.samples * config.model.context, Quiet() if quiet else Progress())
        try:
            ending = engine(config, folder, prepared.dataset.folder, watch, prepared.trace, origin)
        finally:
            watch.close()
        report = _report(folder)
    if ending.outcome == "finished":
        _conclude(config, folder, report)
        return 0
    print(f"report        {report}\nworkers' logs {folder / 'workers'}\ngo on with    planaria train --resume {folder}")
    if ending.outcome == "failed":
        raise UserError(ending.reason)
    raise RunStopped(f"stopped by {ending.reason}" if ending.outcome == "stopped" else ending.reason)


def _report(folder: Path) -> str:
    """The report's path, or why there is none: a full disk must not hide how the run itself ended."""
    try:
        return str(write_report(folder))
    except UserError as error:
        return f"none: {error}"


def _conclude(config: RunConfig, folder: Path, report: str) -> None:
    for line in summary(read_run(folder)):
        print(line)
    if config.prompt:
        print(f"completion    {complete(folder, config.prompt)}")
    print(f"report        {report}")
    print(f"model         {export_run(folder, folder / 'model')}")


def _with_flags(before: RunConfig, flags: Mapping[str, str], folder: Path) -> RunConfig:
    """The run's own configuration with flags laid over it, unless they would make it another run."""
    config = recipe.overlay(before, flags)
    for name in FIXED_ON_RESUME:
        if getattr(config, name) != getattr(before, name):
            flag = next(f for f in flags if f.partition(".")[0] == name)
            raise UserError(f"--{flag} {flags[flag]}: cannot change when {folder} is resumed; start a new run for that")
    return config


def _check_fits(checkpoint: Path, stage: int, config: RunConfig) -> None:
    """A checkpoint that cannot be loaded is to be found out before any worker starts."""
    manifest = read_manifest(checkpoint)
    if (manifest.model, manifest.pipeline_stages) != (config.model, config.pipeline.stages):
        raise UserError(f"{checkpoint}: was written by a model of another shape; choose another with --checkpoint")
    check_stage(checkpoint, stage)


def _choose(store: CheckpointStore, name: str | None) -> Saved | None:
    if name is None:
        return store.newest()
    known = {saved.folder.name: saved for saved in store.list()}
    if name not in known:
        raise UserError(f"--checkpoint {name}: no such checkpoint; there are: {', '.join(known) or 'none'}")
    return known[name]


def _origin(store: CheckpointStore, folder: Path, saved: Saved | None) -> Origin:
    """Where to take up; stages that a partial checkpoint lacks come from the newest whole one before it."""
    generation = read_state(folder).generation if (folder / "state.json").exists() else 0
    if saved is None:
        print(f"{folder}: nothing was saved yet; starting again from step 0")
        return Origin(generation=generation)
    load = dict.fromkeys(saved.manifest.stages, saved.folder.name)
    missing = sorted(set(range(saved.manifest.pipeline_stages + 1)) - set(saved.manifest.stages))
    whole = next((s for s in reversed(store.list()) if s.whole and s.step <= saved.step), None)
    if missing and whole is not None:
        load |= dict.fromkeys(missing, whole.folder.name)
    if missing:
        stand_in = f"their state of step {whole.step}" if whole else "the seed's initial weights"
        print(f"{saved.folder.name}: stages {missing} were lost; they go on from {stand_in}")
    return Origin(saved.step, generation, load, struck=not saved.whole)
