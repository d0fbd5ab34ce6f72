"""Run a comparison: arms × seeds under the same failures, from a recipe to JSON numbers and a report.

An arm's hours are those of its strategy on the model and the machines of the clock's recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from planaria.common import atomic
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.registry import blame_custom_code
from planaria.config.schema import RunConfig
from planaria.data.shards import Data, tokenise_corpus
from planaria.faults.failure_groups import failure_groups, relative_probability
from planaria.faults.trace import Trace, digest, write
from planaria.faults.trace_generation import hourly_of_all
from planaria.lab.compare.clock import ArmClock, activation_bytes, arm_clock, exchanged_bytes, traffic_per_weight_byte
from planaria.lab.compare.race import ArmCourse
from planaria.lab.compare.race_job import Race, run_races
from planaria.lab.compare.race_results import (
    ArmInputs,
    ArmRun,
    ArmScore,
    ComparisonResults,
    SeedTrace,
    add_reset_ratios,
    curve,
    score,
)
from planaria.lab.compare.race_spec import TUNED, Arm, Comparison, load, traces_for
from planaria.lab.report.comparison import write_comparison
from planaria.models.families import stage_parameters
from planaria.pipeline.network.costs import message_bytes
from planaria.recovery import make_chain
from planaria.recovery.checkpoint import best_steps
from planaria.report.observe.bars import JobsProgress
from planaria.runtime.custom_classes import custom_classes
from planaria.runtime.prediction.copy_costs import costs_of_copies, resolve_best_options, step_bytes_and_memory
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.config_checks import check
from planaria.runtime.preparation.prepare import epochs, streams
from planaria.runtime.resolved_run import ResolvedRun
from planaria.trials.arms import prefix_errors
from planaria.trials.result_cache import make_folder

REPORT, NUMBERS = "report.html", "comparison.json"


@dataclass(frozen=True)
class ComparisonRequest:
    """The comparison that a program or a command requests."""

    path: Path
    flags: Mapping[str, object]
    """settings applied to all arms"""
    seeds: Sequence[int] | None = None
    only: Sequence[str] | None = None
    """arms to race"""
    trace: Mapping[str, Any] | None = None
    """overrides of ``compare.trace``"""


@dataclass(frozen=True)
class PreparedComparison:
    """A validated comparison, ready to race."""

    comparison: Comparison
    arms: list[Arm]
    clocks: Mapping[str, ArmClock]
    dataset: Data
    traces: Mapping[int, Sequence[Trace]]
    races: list[Race]
    folder: Path


def prepare_races(requested: ComparisonRequest, notify: Callable[[str], None] | None) -> PreparedComparison:
    """Validate and prepare everything before the first race; ``notify`` reports the preparation of the text.

    :raises UserError: for the first error, with its location and fix.
    """
    path = requested.path
    comparison, arms = load(path, requested.flags, requested.seeds, requested.only, requested.trace)
    arms, clocks = resolve_arms(path, comparison, arms)
    base = arms[0].config
    dataset = tokenise_corpus(base.data, base.model.vocab, notify, base.model.context)
    for arm in arms:
        with prefix_errors(f"{path}: compare.arms.{arm.name}"):
            tuple(epochs(arm.config, streams(arm.config, dataset)[0], arm.config.train.steps * arm.config.samples))
    max_replicas = max(arm.config.exchange.replicas for arm in arms)
    traces = {seed: traces_for(comparison, base, seed, max_replicas) for seed in comparison.seeds}
    races = [_make_race(arm, seed, dataset, traces[seed], clocks) for seed in comparison.seeds for arm in arms]
    return PreparedComparison(comparison, arms, clocks, dataset, traces, races, Path(base.out) / f"{base.name}-compare")


def run_remaining_races(
    requested: ComparisonRequest, quiet: bool, notify: Callable[[str], None] | None
) -> tuple[ComparisonResults, Path]:
    """Run the remaining races of the comparison; return its results and folder."""
    ready = prepare_races(requested, notify)
    folder = ready.folder
    make_folder(folder)
    with run_folders.lock_for_training(folder):
        with JobsProgress(quiet) as progress:
            courses = run_races(ready.races, folder, ready.comparison, progress, custom_classes)
        for seed, drawn in ready.traces.items():
            write(drawn[0], folder / f"trace-{seed}.json")
            for replica, trace in enumerate(drawn[1:], 1):
                write(trace, folder / f"trace-{seed}-replica-{replica}.json")
        scored = _score_arms(requested.path, ready, courses)
        atomic.write_text(folder / NUMBERS, scored.model_dump_json(indent=1))
    write_comparison(scored, folder / REPORT)
    return scored, folder


def _make_race(arm: Arm, seed: int, dataset: Data, traces: Sequence[Trace], clocks: Mapping[str, ArmClock]) -> Race:
    config = arm.config.with_seed(seed)
    return Race(
        arm=arm.name,
        config=config,
        dataset=str(dataset.folder),
        trace=traces[0],
        faults=arm.faults,
        replica_traces=list(traces[1 : config.exchange.replicas]),
        behind=clocks[arm.name].behind,
    )


def _score_arms(path: Path, ready: PreparedComparison, courses: Sequence[ArmCourse]) -> ComparisonResults:
    """Score every arm against the fault-free first arm; the best point of a search becomes an arm."""
    comparison, arms, clocks = ready.comparison, ready.arms, ready.clocks
    base, clock, free = arms[0].config, clocks[arms[0].name], dict[int, ArmCourse]()
    drawn = [
        _seed_trace(seed, replica, trace) for seed, each in ready.traces.items() for replica, trace in enumerate(each)
    ]
    digests = {failures.seed: failures.digest for failures in drawn if not failures.replica}
    raced = list(zip(ready.races, courses, strict=True))
    scored, search = list[ArmScore](), list[ArmScore]()
    for arm in arms:
        own = {race.config.seed: course for race, course in raced if race.arm == arm.name}
        free = free or own
        clocked = clock_config(path, comparison, arm, base)
        scale = _scale(base, clocked) if comparison.clock else 1.0  # an arm's own model determines its hours
        arm_runs = score(free, own, (clock, clocks[arm.name]), digests, comparison.target_at, scale)
        (search if arm.searched else scored).append(
            _score_arm(base, arm, clocked, clocks[arm.name], arm_runs, list(own.values()), scale)
        )
    if search:
        search.insert(0, scored[0])
        scored.insert(1, best_search_arm(search))
    return ComparisonResults(
        name=base.name,
        clock=comparison.clock or str(path),
        steps=base.train.steps,
        stages=base.pipeline.stages,
        target_at=comparison.target_at,
        hourly=comparison.trace.hourly,
        failures=[failures for failures in drawn if not failures.replica],
        replica_failures=[failures for failures in drawn if failures.replica],
        arms=add_reset_ratios(scored),
        search=search,
        failure_domain=comparison.trace.failure_domain,
    )


def best_search_arm(search: Sequence[ArmScore]) -> ArmScore:
    """Return the search's arm with the fewest steps, as the mean over seeds; arms that missed the target do not count.

    It is selected on the same seeds, so its result is slightly optimistic.
    """
    finishers = [(spread.mean, index) for index, arm in enumerate(search) if (spread := arm.spread("ticks"))]
    return search[min(finishers)[1]].model_copy(update={"name": TUNED})


def _seed_trace(seed: int, replica: int, trace: Trace) -> SeedTrace:
    faults = [(fault.step, fault.stage) for fault in trace.faults]
    return SeedTrace(seed=seed, digest=digest(trace), faults=faults, replica=replica)


def _scale(raced: RunConfig, clocked: RunConfig) -> float:
    """Return the parameters of a block stage of the clock's model over those of the raced model."""
    ours, theirs = (stage_parameters(c.model, c.pipeline.stages, 1) for c in (raced, clocked))
    return theirs / ours


def _score_arm(
    base: RunConfig,
    arm: Arm,
    clocked: RunConfig,
    clock: ArmClock,
    runs: list[ArmRun],
    courses: list[ArmCourse],
    scale: float,
) -> ArmScore:
    """Score an arm's runs, and its copies' costs in the clock's model; further replicas count as copies."""
    copies, memory = step_bytes_and_memory(ResolvedRun(clocked)) if arm.faults else (0.0, 0.0)
    memory += arm.config.exchange.replicas / base.exchange.replicas - 1.0
    sent = copies + exchanged_bytes(clocked)
    chain = make_chain(arm.config.recovery, arm.config.pipeline.stages)
    return ArmScore(
        name=arm.name,
        changes=_changed_settings(base, arm.config),
        faults=arm.faults,
        routing=arm.config.routing.kind,
        runs=runs,
        step_s=clock.step_s,
        save_s=clock.save_s,
        step_bytes=sent,
        traffic=sent / activation_bytes(clocked),
        traffic_per_weight_byte=traffic_per_weight_byte(clocked),
        memory=memory,
        workers=clock.workers,
        curves=[curve(course, clock, scale) for course in courses],
        control=chain.control_strategy if arm.faults else "",
        exact=all(strategy.exact for strategy in chain.strategies.values()),
        computes_copies=any(cost.forward for _, cost in costs_of_copies(ResolvedRun(clocked))),
        inputs=_arm_inputs(clocked, clock, scale),
        courses=courses,
    )


def _arm_inputs(config: RunConfig, clock: ArmClock, scale: float) -> ArmInputs:
    pipeline, stages = config.pipeline, config.pipeline.stages
    sample = config.model.context * config.model.dim * pipeline.microbatch_size
    return ArmInputs(
        replacement_s=clock.replacement_s,
        load_s=clock.load_s,
        repeated_steps=clock.mean_repeated_steps,
        bandwidth=None if math.isinf(clock.bandwidth) else clock.bandwidth,
        scale=scale,
        replicas=config.exchange.replicas,
        stages=stages,
        microbatches=pipeline.microbatches,
        microbatch_size=pipeline.microbatch_size,
        context=config.model.context,
        dim=config.model.dim,
        wire_bytes=sum(message_bytes(config.model, pipeline)) / 2 / sample,
        parameters=[stage_parameters(config.model, stages, stage) for stage in range(stages + 1)],
    )


def _changed_settings(base: RunConfig, config: RunConfig) -> dict[str, str]:
    common, settings = recipe.flatten(base), recipe.flatten(config)
    return {name: str(value) for name, value in settings.items() if common.get(name) != value and name != "name"}


def resolve_arms(path: Path, comparison: Comparison, arms: Sequence[Arm]) -> tuple[list[Arm], dict[str, ArmClock]]:
    """Return the arms with 'best' intervals resolved to numbers, and the clock of each.

    :raises UserError: naming the arm that the engine rejects, and why.
    """
    if arms[0].config.routing.schedule is not None:
        raise UserError(f"{path}: routing.schedule: comparisons do not support schedules; remove it")
    if arms[0].config.train.start is not None:
        raise UserError(f"{path}: train.start: arms start with the weights of their seed; remove it")
    for arm in arms:
        if arm.config.checkpoint.store is not None:
            location = path if arm.config == arms[0].config else f"{path}: compare.arms.{arm.name}"
            raise UserError(f"{location}: checkpoint.store: races keep their checkpoints in memory; remove it")
    clock_configs = {arm.name: clock_config(path, comparison, arm, arms[0].config) for arm in arms}
    clocks = {arm.name: _make_clock(path, arm, clock_configs[arm.name]) for arm in arms}
    resolved_arms = [_with_best_interval(comparison, arm, clock_configs[arm.name], clocks[arm.name]) for arm in arms]
    for arm in resolved_arms:
        with prefix_errors(f"{path}: compare.arms.{arm.name}"):
            check(arm.config.model_copy(update={"engine": "inline"}))
    return resolved_arms, clocks


def _make_clock(path: Path, arm: Arm, config: RunConfig) -> ArmClock:
    with prefix_errors(f"{path}: compare.arms.{arm.name}"), blame_custom_code(partial(custom_classes, config)):
        return arm_clock(config)


def _with_best_interval(comparison: Comparison, arm: Arm, clocked: RunConfig, clock: ArmClock) -> Arm:
    """Return the arm with its best intervals as numbers of steps, by the clock and the trace's rate."""
    config, trace = arm.config.model_copy(update={"recovery": clocked.recovery}), comparison.trace
    if config.checkpoint.every != "best":
        return arm.model_copy(update={"config": config})
    eligible_stages = set(range(0 if trace.ends else 1, config.pipeline.stages + 1)) - set(trace.exempt)
    hourly = hourly_of_all(trace.hourly, trace.step_s, config.exchange.replicas)
    expected_failing_groups = relative_probability(trace.failure_domain) * len(
        failure_groups(trace.failure_domain, eligible_stages, config.pipeline.stages, trace.machine)
    )
    every = max(best_steps(hourly, expected_failing_groups, clock.step_s, clock.save_s), clock.behind)
    checkpoint = config.checkpoint.model_copy(update={"every": every})
    return arm.model_copy(update={"config": config.model_copy(update={"checkpoint": checkpoint})})


def clock_config(path: Path, comparison: Comparison, arm: Arm, base: RunConfig) -> RunConfig:
    """Return the configuration for an arm's hours: its recovery on the clock recipe's model and network.

    A replica gets the same share of the clock recipe's microbatches as the arm has of those of ``base``.
    """
    if not comparison.clock:
        return resolve_best_options(arm.config)
    recipe_file = path.parent / comparison.clock
    clock = recipe.load(recipe_file if recipe_file.is_file() else Path(comparison.clock), {}, "train", "compare")
    if clock.pipeline.stages != arm.config.pipeline.stages:
        raise UserError(
            f"{path}: compare.clock = {comparison.clock!r} has {clock.pipeline.stages} block stages, "
            f"this comparison {arm.config.pipeline.stages}; set pipeline.stages = {clock.pipeline.stages} in {path}, "
            f"or pipeline.stages = {arm.config.pipeline.stages} in {recipe_file}"
        )
    if arm.config.model.dim != base.model.dim:
        raise UserError(
            f"{path}: compare.arms.{arm.name}.model.dim = {arm.config.model.dim}: compare.clock takes the hours of all "
            "arms from one model; remove compare.clock"
        )
    product = clock.pipeline.microbatches * arm.config.pipeline.microbatches
    count, left = divmod(product, base.pipeline.microbatches)
    if left:
        raise UserError(
            f"{path}: compare.arms.{arm.name}: pipeline.microbatches = {arm.config.pipeline.microbatches} of "
            f"{base.pipeline.microbatches} are not a multiple of {comparison.clock}'s {clock.pipeline.microbatches}; "
            "use another number, or another compare.clock"
        )
    pipeline = clock.pipeline.model_copy(update={"microbatches": count})
    names = ("routing", "recovery", "exchange", "checkpoint")
    return resolve_best_options(
        clock.model_copy(update={"pipeline": pipeline} | {name: getattr(arm.config, name) for name in names})
    )
