"""A validated run: its configuration is checked, its text tokenised, its faults and initial weights read.

Engines accept only a :class:`PreparedRun`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.data.corpus import resolve_formats
from planaria.data.shards import Data, tokenise_corpus
from planaria.data.stream import Stream
from planaria.faults.checks import require_receivers
from planaria.faults.trace import Trace
from planaria.models.foreign_weights import WeightsFile
from planaria.planner.guidelines import find_violations
from planaria.planner.schedule import read as read_schedule
from planaria.recovery.codes.sparse import read_code
from planaria.runtime.prediction.copy_costs import resolve_best_options
from planaria.runtime.prediction.preflight_table import fit_or_show
from planaria.runtime.preparation.config_checks import check, read_faults, standby_warnings
from planaria.runtime.preparation.starting_weights import require_tokenizer, starting_weights, weight_warnings
from planaria.runtime.preparation.unused_settings import require_used, without_effect
from planaria.runtime.resolved_run import ResolvedRun


@dataclass(frozen=True)
class PreparedRun:
    """A validated run, ready to start."""

    run: ResolvedRun
    dataset: Data
    trace: Trace
    parent: WeightsFile | None = None
    """the open weights of ``train.start``"""
    notes: tuple[str, ...] = ()
    """one line each about settings without effect, and epochs of a mixture's sources"""

    @property
    def config(self) -> RunConfig:
        return self.run.config

    def with_config(self, config: RunConfig) -> PreparedRun:
        """Return the same run with another configuration."""
        return self if config is self.config else replace(self, run=ResolvedRun(config))


def prepare(
    config: RunConfig,
    notify: Callable[[str], None] | None = None,
    trace: Trace | None = None,
    begins: bool = True,
    samples: int | None = None,
    warn: Callable[[str], None] | None = None,
) -> PreparedRun:
    """Check the recipe, tokenise its text, and read its faults and initial weights; start no worker.

    :param notify: receives progress messages
    :param trace: replaces the recipe's trace
    :param begins: False for a resumed run, which may keep unused settings and has its weights
    :param samples: the run's total number of samples, if its steps differ in size
    :param warn: receives the warnings before the text is tokenised; if None, ``notes`` contain them
    :raises UserError: for the first invalid setting, with its place and a fix.
    """
    if config.engine == "simulate":
        raise UserError("engine = 'simulate': a simulation trains no model; use 'inline' or 'fleet'")
    if begins:
        require_used(config)
    run, fits = check(config), ""
    if begins and config.pipeline.layers != "auto":
        config, fits = fit_or_show(config, notify)
        run = run if config is run.config else ResolvedRun(config)
    if trace is not None:
        require_receivers(config, trace.faults, config.chaos.trace or "the trace")
    faults = trace if trace is not None else read_faults(run)
    parent = starting_weights(config) if begins else None
    warned: tuple[str, ...] = ()
    if begins:
        warnings = (*without_effect(run, faults), *standby_warnings(config), *weight_warnings(run, parent))
        warned = (*filter(None, (fits,)), *warnings)
    if warn is not None:  # tokenising may take minutes
        for line in warned:
            warn(line)
        warned = ()
    dataset = tokenise_corpus(config.data, config.model.vocab, notify, config.model.context)
    train, _ = streams(config, dataset)
    read = epochs(config, train, config.train.steps * config.samples if samples is None else samples)
    if parent is not None:
        require_tokenizer(parent, config, dataset)
    return PreparedRun(run, dataset, faults, parent, (*warned, *read))


def streams(config: RunConfig, dataset: Data) -> tuple[Stream, Stream | None]:
    """Return the training and validation samples of a run; the latter are None if they are too few and never used.

    :raises UserError: if a split is too short for one sample.
    """
    context, seed = config.model.context, config.seed
    validated = config.train.eval_every or dataset.windows("validation", context)
    validation = Stream(dataset, "validation", context, seed) if validated else None
    return Stream(dataset, "train", context, seed), validation


def with_code_embedded(config: RunConfig, recipe: Path | None) -> RunConfig:
    """Replace the path of a code file by its contents: decisions depend on them, and other machines lack the file."""
    name = config.recovery.options.get("code")
    if not isinstance(name, str) or not name.endswith(".json"):
        return config
    code = read_code(relative_to_recipe(recipe, name)).model_dump_json()
    recovery = config.recovery.model_copy(update={"options": {**config.recovery.options, "code": code}})
    return config.model_copy(update={"recovery": recovery})


def with_absolute_paths(config: RunConfig, recipe: Path | None) -> RunConfig:
    """Return the recipe with numbers for 'best' settings, absolute paths of the trace and schedule beside the file
    ``recipe``, and the contents of a code file.

    :raises UserError: if the schedule is invalid or does not match the recipe, or the code file cannot be read.
    """
    config = resolve_best_options(with_code_embedded(config, recipe))
    config = config.model_copy(update={"data": resolve_formats(config.data)})
    if config.chaos.trace is not None and (file := relative_to_recipe(recipe, config.chaos.trace)) != Path(
        config.chaos.trace
    ):
        chaos = config.chaos.model_copy(update={"trace": str(file.absolute())})
        config = config.model_copy(update={"chaos": chaos})
    if config.routing.schedule is None:
        return config
    file = relative_to_recipe(recipe, config.routing.schedule).absolute()
    schedule, pipeline = read_schedule(file), config.pipeline
    if wrong := find_violations(schedule.problem, schedule.solution):
        raise UserError(f"{file}: not a valid schedule: {wrong[0]}; plan again")
    if len(schedule.stages) != pipeline.stages + 1:
        raise UserError(f"{file} has {len(schedule.stages) - 1} block stages; pipeline.stages = {pipeline.stages}")
    if len(schedule.routes) != pipeline.microbatches:
        raise UserError(
            f"{file} has routes for {len(schedule.routes)} microbatches; pipeline.microbatches = "
            f"{pipeline.microbatches}"
        )
    if config.routing.wait_for_gradient_sums and schedule.sums_s is None:
        raise UserError(
            f"{file} was planned without gradient sums; plan again with routing.wait_for_gradient_sums, or remove it"
        )
    return on_schedule(config, file)


def on_schedule(config: RunConfig, file: Path) -> RunConfig:
    """Return the recipe with this schedule."""
    return config.model_copy(update={"routing": config.routing.model_copy(update={"schedule": str(file)})})


def relative_to_recipe(recipe: Path | None, name: str) -> Path:
    """Return the path of a file that a recipe names: beside the recipe if it exists there, else as named."""
    file = Path(name)
    if recipe is not None and not file.is_absolute() and (recipe.parent / file).is_file():
        return recipe.parent / file
    return file


def epochs(config: RunConfig, train: Stream, samples: int) -> Iterator[str]:
    """Yield a line for each source of a mixture, and for dialogues; ``samples``: the run's total.

    :raises UserError: if they exceed the ``epochs`` of a source; the message names the allowed steps.
    """
    mixture, past = config.data.mixture, samples - config.train.steps * config.samples
    taken = train.turns.before(samples)
    if train.rows and not mixture:
        yield f"dialogues     {samples / train.windows:.2f} epochs of {train.windows:,} rows"
    for index, (name, source) in enumerate(train.sources.items() if mixture else ()):
        count, most = taken[index], mixture[name].epochs
        if most is not None and count > most * source.windows:
            allowed = int(most * source.windows)
            steps = range(config.train.steps)
            last = bisect_right(steps, allowed, key=lambda s: train.turns.before(past + s * config.samples)[index]) - 1
            fewer = f"set train.steps to {last} or less" if last > 0 else "use fewer samples per step"
            raise UserError(
                f"data.mixture.{name}.epochs = {most:g}: train.steps = {config.train.steps} uses {count} of its "
                f"{source.windows} samples: {count / source.windows:.2f} epochs; {fewer}, lower its "
                "weight, or raise its epochs"
            )
        share, read = count / max(1, samples), count / source.windows
        size = f"{source.windows:,} samples"
        yield f"mixture       {name}: {share:.1%} of the samples, {read:.2f} epochs of its {size}"
