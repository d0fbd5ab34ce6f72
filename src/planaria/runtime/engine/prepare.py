"""A validated run: the configuration checked, its text tokenised, its faults and initial weights read.

Engines accept a :class:`Prepared` run and nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.data.shards import Data
from planaria.data.shards import prepare as prepare_data
from planaria.data.stream import Stream
from planaria.faults.checks import require_listeners
from planaria.faults.trace import Trace
from planaria.models.foreign import Weights
from planaria.planner.guidelines import broken
from planaria.planner.schedule import read as read_schedule
from planaria.runtime.engine.branch import require_tokenizer, starting_weights, unfit
from planaria.runtime.engine.check import check, read_faults
from planaria.runtime.engine.copy_costs import settle
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.unused import idle, require_used


@dataclass(frozen=True)
class Prepared:
    """A validated run: everything that an engine begins with."""

    run: ResolvedRun
    dataset: Data
    trace: Trace
    parent: Weights | None = None
    """what ``train.start`` names, on its disk"""
    notes: tuple[str, ...] = ()
    """what to know before it begins, a line each: settings for other runs than this, epochs of a mixture's sources"""

    @property
    def config(self) -> RunConfig:
        return self.run.config

    def with_config(self, config: RunConfig) -> Prepared:
        """Return the same run with another configuration."""
        return self if config is self.config else replace(self, run=ResolvedRun(config))


def prepare(
    config: RunConfig,
    say: Callable[[str], None] | None = None,
    trace: Trace | None = None,
    begins: bool = True,
    samples: int | None = None,
) -> Prepared:
    """Check the recipe, tokenise its text, read its faults and the weights that it starts from. No worker starts.

    ``say`` hears of the text's preparation; ``trace`` takes the place of the recipe's. A run that goes on (not
    ``begins``) may keep settings that it needs no more, and has its weights already. ``samples``: all that it takes
    to its end, if not every step takes as many as the recipe says.

    :raises UserError: naming the first thing that is wrong, its place and the mend.
    """
    if config.engine == "simulate":
        raise UserError("engine = 'simulate': a simulation trains no model; use 'inline' or 'fleet'")
    if begins:
        require_used(config)
    run = check(config)
    if trace is not None:
        require_listeners(config, trace.faults, config.chaos.trace or "the trace")
    faults = trace if trace is not None else read_faults(run)
    parent = starting_weights(config) if begins else None
    dataset = prepare_data(config.data, config.model.vocab, say)
    train, _ = streams(config, dataset)
    read = epochs(config, train, config.train.steps * config.samples if samples is None else samples)
    if parent is not None:
        require_tokenizer(parent, config, dataset)
    warned = (*idle(run, faults), *unfit(run, parent)) if begins else ()
    return Prepared(run, dataset, faults, parent, (*warned, *read))


def streams(config: RunConfig, dataset: Data) -> tuple[Stream, Stream | None]:
    """Training and validation samples of a run; a recipe that never validates may have too few of the latter: None.

    :raises UserError: when a split is too short for one sample.
    """
    context, seed = config.model.context, config.seed
    validated = config.train.eval_every or dataset.windows("validation", context)
    validation = Stream(dataset, "validation", context, seed) if validated else None
    return Stream(dataset, "train", context, seed), validation


def placed(config: RunConfig, recipe: Path | None) -> RunConfig:
    """The recipe with numbers for what it calls 'best', and the full paths of the trace and the schedule that lie
    beside its file ``recipe``.

    :raises UserError: when its schedule cannot be read, breaks a rule, or is not for this recipe.
    """
    config = settle(config)
    if config.chaos.trace is not None and (file := beside(recipe, config.chaos.trace)) != Path(config.chaos.trace):
        chaos = config.chaos.model_copy(update={"trace": str(file.absolute())})
        config = config.model_copy(update={"chaos": chaos})
    if config.routing.schedule is None:
        return config
    file = beside(recipe, config.routing.schedule).absolute()
    schedule, pipeline = read_schedule(file), config.pipeline
    if wrong := broken(schedule.problem, schedule.solution):
        raise UserError(f"{file}: not a valid schedule: {wrong[0]}; plan again")
    if len(schedule.stages) != pipeline.stages + 1:
        raise UserError(f"{file}: has {len(schedule.stages) - 1} block stages; pipeline.stages = {pipeline.stages}")
    if len(schedule.routes) != pipeline.microbatches:
        raise UserError(
            f"{file}: has routes for {len(schedule.routes)} microbatches; pipeline.microbatches = "
            f"{pipeline.microbatches}"
        )
    if config.routing.sums and schedule.sums_s is None:
        raise UserError(f"{file}: was planned without gradient sums; plan again with routing.sums, or leave it out")
    return on_schedule(config, file)


def on_schedule(config: RunConfig, file: Path) -> RunConfig:
    """The recipe with this schedule."""
    return config.model_copy(update={"routing": config.routing.model_copy(update={"schedule": str(file)})})


def beside(recipe: Path | None, name: str) -> Path:
    """A file that a recipe names: beside the recipe if it is there, or at its path."""
    file = Path(name)
    if recipe is not None and not file.is_absolute() and (recipe.parent / file).is_file():
        return recipe.parent / file
    return file


def epochs(config: RunConfig, train: Stream, samples: int) -> Iterator[str]:
    """A line for each source of the mixture; nothing without one. ``samples``: all that the run takes, to its end.

    :raises UserError: when that is more of a source than its ``epochs`` allow, naming the steps that they allow.
    """
    mixture, left = config.data.mixture, samples - config.train.steps * config.samples
    taken = train.turns.before(samples)
    for place, (name, source) in enumerate(train.sources.items() if mixture else ()):
        count, most = taken[place], mixture[name].epochs
        if most is not None and count > most * source.windows:
            allowed = int(most * source.windows)
            steps = range(config.train.steps)
            last = bisect_right(steps, allowed, key=lambda s: train.turns.before(left + s * config.samples)[place]) - 1
            fewer = f"set train.steps to {last} or less" if last > 0 else "take fewer samples in a step"
            raise UserError(
                f"data.mixture.{name}.epochs = {most:g}: train.steps = {config.train.steps} takes {count} of its "
                f"samples, and there are {source.windows}: {count / source.windows:.2f} epochs; {fewer}, lower its "
                "weight, or raise its epochs"
            )
        share, read = count / max(1, samples), count / source.windows
        yield f"mixture       {name}: {share:.1%} of the samples, {read:.2f} epochs of its {source.windows:,}"
