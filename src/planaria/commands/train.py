"""``planaria train``: from a recipe to a trained model, its report and its export."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from planaria import digests, documents, recipe
from planaria.chaos.trace import Trace
from planaria.chaos.trace import read as read_trace
from planaria.commands import runs
from planaria.commands.branch import branch_off, starting_weights
from planaria.commands.export import export_run
from planaria.commands.generate import complete
from planaria.commands.plan import describe
from planaria.commands.schedule import beside, on_schedule, with_schedule
from planaria.commands.unused import idle, require_used
from planaria.config import RunConfig
from planaria.data.shards import Dataset, prepare
from planaria.data.stream import Stream
from planaria.engine import fleet, inline_run
from planaria.engine.itinerary import Itinerary
from planaria.engine.origin import START, Origin
from planaria.errors import RunStopped, UserError
from planaria.exchange import exchange
from planaria.observe.live.progress import Progress, Quiet
from planaria.observe.live.watch import Watch
from planaria.observe.run.report import write_report
from planaria.observe.run.summary import summary
from planaria.plan.check import require
from planaria.planner.schedule import MAX_BYTES as SCHEDULE_BYTES
from planaria.record.logs import read_run
from planaria.recovery import names, recovery

MODEL = "model"
"""the folder in a run's that a finished run is exported to"""


@dataclass(frozen=True)
class Prepared:
    """A run about which nothing is left to complain."""

    config: RunConfig
    dataset: Dataset
    trace: Trace


def start(recipe_file: Path | None, flags: Mapping[str, str], dry_run: bool, quiet: bool) -> int:
    """Train a recipe from its first step; the exit code."""
    config = with_schedule(recipe.load(recipe_file, flags, "train"), recipe_file)
    if config.engine != "simulate":
        require_used(config)
    if dry_run:
        check(config)
        print(recipe.dump(config), end="")
        return 0
    if config.engine == "simulate":
        check(config)
        print(describe(config))
        return 0
    prepared = prepare_run(config, quiet, recipe_file)
    for line in idle(config, prepared.trace):
        print(line)
    parent = starting_weights(prepared.config, prepared.dataset)
    folder = runs.create(config)
    if config.routing.schedule is not None:
        digests.put(folder, {runs.SCHEDULE: documents.data(Path(config.routing.schedule), SCHEDULE_BYTES)})
        prepared = replace(prepared, config=on_schedule(config, (folder / runs.SCHEDULE).absolute()))
    with runs.held(folder):
        origin = START if parent is None else branch_off(parent, folder, prepared.config)
        return train_prepared(prepared, folder, origin, quiet)


def check(config: RunConfig) -> None:
    """Everything that can be wrong with a recipe by itself, before any data is touched."""
    chain = recovery(config.recovery, config.pipeline.stages)
    itinerary = Itinerary(config, together=config.engine == "inline")
    require(itinerary.training(0))
    if chain.slots and config.exchange.replicas > 1:
        raise UserError(
            f"recovery.strategy = {config.recovery.strategy!r} keeps copies of stages at other stages' workers; with "
            "exchange.replicas, a lost stage is copied from another replica: use 'checkfree' or 'checkpoint'"
        )
    exchange(config.exchange)
    if config.exchange.replicas > 1:
        _check_replicas(config, itinerary)
    if config.exchange.most is not None and config.engine == "inline":
        raise UserError("exchange.most: no machines join a run in one process; leave it out, or use --engine fleet")
    if config.exchange.most is not None and itinerary.replicas == 1 and config.engine == "fleet":
        raise UserError(
            f"exchange.most = {config.exchange.most}: replicas that come later agree with others now and then; begin "
            "with exchange.replicas = 2 or more, and an exchange.kind other than 'allreduce'"
        )
    if config.checkpoint.every == "best" and config.engine != "fleet":
        raise UserError(
            f"checkpoint.every = 'best' measures real saves; give engine {config.engine!r} a number of steps"
        )
    if config.checkpoint.every == "best" and not config.network.hourly:
        raise UserError("network.hourly = 0: without failures no interval is best; give checkpoint.every a number")
    kind = config.routing.kind if itinerary.schedule is None else "a schedule"
    if "checkfree_plus" in names(config.recovery) and kind != "swapped":
        raise UserError(
            f"recovery.strategy = {config.recovery.strategy!r} needs routing.kind = 'swapped', not {kind!r}: only then "
            "has an outer stage a partner that can stand in for it"
        )
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device = 'cuda': this machine has no CUDA device; use 'cpu'")


def _check_replicas(config: RunConfig, itinerary: Itinerary) -> None:
    if itinerary.schedule is not None:
        raise UserError("routing.schedule: a schedule is for one replica; leave exchange.replicas out")
    if config.engine != "fleet":
        if config.exchange.inner:
            raise UserError("exchange.inner: in one process all replicas step together; give exchange.every")
        return
    if itinerary.replicas == 1 and config.exchange.bits != 32:
        raise UserError(
            f"exchange.bits = {config.exchange.bits}: with exchange.kind = 'allreduce' the fleet adds gradients up in "
            "full precision; leave it out, use --engine inline, or another exchange.kind"
        )
    if config.routing.mixed:
        raise UserError(
            "routing.mixed = true binds the replicas together in every step, and on the fleet none waits for all; use "
            "--engine inline"
        )
    if config.checkpoint.every == "best":
        raise UserError(
            "checkpoint.every = 'best' is for one replica; with exchange.replicas = "
            f"{config.exchange.replicas} give it a number"
        )
    if config.recovery.meanwhile == "skip":
        raise UserError(
            "recovery.meanwhile = 'skip': with exchange.replicas a lost stage is copied from another replica; use "
            "'wait'"
        )


def prepare_run(config: RunConfig, quiet: bool, recipe_file: Path | None = None) -> Prepared:
    """Check the recipe, tokenise its text, read its faults (from a path that may be relative to the recipe)."""
    check(config)
    trace = Trace(faults=())
    if config.chaos.trace is not None:
        file = beside(recipe_file, config.chaos.trace)
        trace = read_trace(file)
        itinerary = Itinerary(config)
        last = len(itinerary.arrangement.stage) - 1
        place = "stage" if last == config.pipeline.stages and itinerary.schedule is None else "node"
        for fault in trace.faults:
            if fault.stage > last:
                raise UserError(f"{file}: a fault at {place} {fault.stage}; this run has {place}s 0..{last}")
    dataset = prepare(config.data, config.model.vocab, None if quiet else print)
    Stream(dataset, "train", config.model.context, config.seed)
    if config.train.eval_every:
        Stream(dataset, "validation", config.model.context, config.seed)
    return Prepared(config, dataset, trace)


def train_prepared(prepared: Prepared, folder: Path, origin: Origin, quiet: bool) -> int:
    """Train in ``folder``, which the caller holds; then tell how it went. The exit code.

    :raises RunStopped: when the run ended early for a reason that is nobody's mistake.
    :raises UserError: when it ended for one that can be mended.
    """
    config = prepared.config
    engine = fleet.train if config.engine == "fleet" else inline_run.train
    runs.keep(folder, config, prepared.dataset, prepared.trace)
    watch = Watch(folder, config.samples * config.model.context, Quiet() if quiet else Progress())
    try:
        ending = engine(config, folder, prepared.dataset.folder, watch, prepared.trace, origin)
    finally:
        watch.close()
    if ending.outcome == "finished":
        conclude(config, folder)
        return 0
    print(f"report        {_report(folder)}")
    print(f"workers' logs {folder / 'workers'}\ngo on with    planaria train --resume {folder}")
    if ending.outcome == "failed" or watch.trouble:
        raise UserError(ending.reason)
    raise RunStopped(f"stopped by {ending.reason}" if ending.outcome == "stopped" else ending.reason)


def _report(folder: Path) -> str:
    """The report's path, or why there is none: a full disk must not hide how the run itself ended."""
    try:
        return str(write_report(folder))
    except UserError as error:
        return f"none: {error}"


def conclude(config: RunConfig, folder: Path) -> None:
    """Tell what a finished run came to, then write down what can be written.

    :raises UserError: when the model cannot be exported; it is trained, and safe in its checkpoint.
    """
    for line in summary(read_run(folder)):
        print(line)
    if config.prompt:
        print(f"completion    {complete(folder, config.prompt)}")
    print(f"report        {_report(folder)}")
    try:
        model = export_run(folder, _cleared(folder / MODEL))
    except UserError as error:
        mend = f"planaria export {folder} --to {folder / MODEL}"
        raise UserError(f"{error}: the run is finished and saved; when that is mended, `{mend}`") from error
    print(f"model         {model}")


def _cleared(folder: Path) -> Path:
    """``folder`` without what an earlier part of the run exported there."""
    if folder.exists():
        shutil.rmtree(folder)
    return folder
