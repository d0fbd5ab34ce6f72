"""Arms × seeds on the same failures, from a recipe to every number as JSON and a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from planaria import atomic, recipe
from planaria.chaos.generating import hourly_of_all
from planaria.chaos.trace import Trace, digest, write
from planaria.compare.clock import Clock, clock_of, exchanged_bytes, step_bytes_and_memory
from planaria.compare.race import Course
from planaria.compare.race_job import Race, run_races
from planaria.compare.race_results import Compared, Failures, Run, Scored, curve, score
from planaria.compare.race_spec import Arm, Comparison, load, traces_for
from planaria.config import RunConfig
from planaria.data.shards import Data, prepare
from planaria.engine import runs
from planaria.engine.best import settle
from planaria.engine.epochs import epochs
from planaria.engine.itinerary import Itinerary
from planaria.engine.own_classes import own_classes
from planaria.engine.prepare import check, streams
from planaria.engine.simulate import simulate
from planaria.errors import UserError
from planaria.model.families import stage_parameters
from planaria.network.costs import UNIT, message_bytes
from planaria.observe.live.jobs_progress import JobsProgress
from planaria.observe.trials.comparison import write_comparison
from planaria.recovery.checkpoint import best_steps
from planaria.registry import blaming
from planaria.trials.arms import of_arm
from planaria.trials.kept import make_folder

REPORT, NUMBERS = "report.html", "comparison.json"


def raced(
    path: Path,
    flags: Mapping[str, object],
    seeds: Sequence[int] | None,
    only: Sequence[str] | None,
    quiet: bool,
    say: Callable[[str], None] | None,
    together: float | None = None,
) -> tuple[Compared, Path]:
    """Run the comparison in the recipe ``path``, or what is left of it: what it found, and its folder.

    For ``seeds``, ``only`` and ``together`` see ``compare.race_spec.load``; ``say`` hears of the text's preparation.
    """
    comparison, arms = load(path, flags, seeds, only, together)
    arms, clocks = checked(path, comparison, arms)
    base = arms[0].config
    dataset = prepare(base.data, base.model.vocab, say)
    for arm in arms:
        with of_arm(f"{path}: compare.arms.{arm.name}"):
            tuple(epochs(arm.config, streams(arm.config, dataset)[0], arm.config.train.steps * arm.config.samples))
    most = max(arm.config.exchange.replicas for arm in arms)
    traces = {seed: traces_for(comparison, base, seed, most) for seed in comparison.seeds}
    folder = Path(base.out) / f"{base.name}-compare"
    races = [_race(arm, seed, dataset, traces[seed], clocks) for seed in comparison.seeds for arm in arms]
    make_folder(folder)
    with runs.held(folder):
        with JobsProgress(quiet) as progress:
            courses = run_races(races, folder, comparison, progress, own_classes)
        for seed, drawn in traces.items():
            write(drawn[0], folder / f"trace-{seed}.json")
            for replica, trace in enumerate(drawn[1:], 1):
                write(trace, folder / f"trace-{seed}-replica-{replica}.json")
        found = _compared(path, comparison, arms, clocks, traces, races, courses)
        atomic.write_text(folder / NUMBERS, found.model_dump_json(indent=1))
    write_comparison(found, folder / REPORT)
    return found, folder


def checked(path: Path, comparison: Comparison, arms: Sequence[Arm]) -> tuple[list[Arm], dict[str, Clock]]:
    """The arms as they can be raced, with numbers for what they call 'best', and the clock of each.

    :raises UserError: naming the arm that no engine takes, and why.
    """
    if arms[0].config.routing.schedule is not None:
        raise UserError(f"{path}: routing.schedule: schedules are not raced: their nodes are no stages; leave it out")
    if arms[0].config.train.start is not None:
        raise UserError(f"{path}: train.start: arms begin with the weights of their seed; leave it out")
    for arm in arms:
        if arm.config.checkpoint.store is not None:
            place = path if arm.config == arms[0].config else f"{path}: compare.arms.{arm.name}"
            raise UserError(f"{place}: checkpoint.store: races keep their checkpoints in memory; leave it out")
    on_the_clock = {arm.name: clock_config(path, comparison, arm, arms[0].config) for arm in arms}
    clocks = {arm.name: _clock(path, arm, on_the_clock[arm.name]) for arm in arms}
    settled = [_settled(comparison, arm, on_the_clock[arm.name], clocks[arm.name]) for arm in arms]
    for arm in settled:
        with of_arm(f"{path}: compare.arms.{arm.name}"):
            check(arm.config.model_copy(update={"engine": "inline"}))
    return settled, clocks


def _clock(path: Path, arm: Arm, config: RunConfig) -> Clock:
    with of_arm(f"{path}: compare.arms.{arm.name}"), blaming(partial(own_classes, config)):
        return clock_of(config)


def _settled(comparison: Comparison, arm: Arm, on_the_clock: RunConfig, clock: Clock) -> Arm:
    """The arm with its best intervals as numbers of steps, by the clock and the trace's rate."""
    config, trace = arm.config.model_copy(update={"recovery": on_the_clock.recovery}), comparison.trace
    if config.checkpoint.every != "best":
        return arm.model_copy(update={"config": config})
    struck = set(range(0 if trace.ends else 1, config.pipeline.stages + 1)) - set(trace.exempt)
    hourly = hourly_of_all(trace.hourly, trace.step_s, config.exchange.replicas)
    every = max(best_steps(hourly, len(struck), clock.step_s, clock.save_s), clock.behind)
    checkpoint = config.checkpoint.model_copy(update={"every": every})
    return arm.model_copy(update={"config": config.model_copy(update={"checkpoint": checkpoint})})


def _race(arm: Arm, seed: int, dataset: Data, traces: Sequence[Trace], clocks: Mapping[str, Clock]) -> Race:
    config = arm.config.model_copy(update={"seed": seed})
    return Race(
        arm=arm.name,
        config=config,
        dataset=str(dataset.folder),
        trace=traces[0],
        faults=arm.faults,
        further=list(traces[1 : config.exchange.replicas]),
        behind=clocks[arm.name].behind,
    )


def clock_config(path: Path, comparison: Comparison, arm: Arm, base: RunConfig) -> RunConfig:
    """What the hours are for: the arm's way of coping, on the model and the network of the clock's recipe.

    A replica has as many of its microbatches as the arm has of those of ``base``, the recipe that it changes.
    """
    if not comparison.clock:
        return settle(arm.config)
    beside = path.parent / comparison.clock
    other = recipe.load(beside if beside.is_file() else Path(comparison.clock), {}, "train", "compare")
    if other.pipeline.stages != arm.config.pipeline.stages:
        raise UserError(
            f"{path}: compare.clock = {comparison.clock!r}: has {other.pipeline.stages} block stages, "
            f"this comparison {arm.config.pipeline.stages}; the same failures must mean the same"
        )
    share = other.pipeline.microbatches * arm.config.pipeline.microbatches
    count, left = divmod(share, base.pipeline.microbatches)
    if left:
        raise UserError(
            f"{path}: compare.arms.{arm.name}: pipeline.microbatches = {arm.config.pipeline.microbatches} of "
            f"{base.pipeline.microbatches} are no whole number of {comparison.clock}'s {other.pipeline.microbatches}; "
            "give another number, or another compare.clock"
        )
    pipeline = other.pipeline.model_copy(update={"microbatches": count})
    taken = ("routing", "recovery", "exchange", "checkpoint")
    return settle(other.model_copy(update={"pipeline": pipeline} | {name: getattr(arm.config, name) for name in taken}))


def _compared(
    path: Path,
    comparison: Comparison,
    arms: list[Arm],
    clocks: Mapping[str, Clock],
    traces: Mapping[int, Sequence[Trace]],
    races: Sequence[Race],
    courses: Sequence[Course],
) -> Compared:
    base, clock, free = arms[0].config, clocks[arms[0].name], dict[int, Course]()
    told = [_failures(seed, replica, trace) for seed, all_ in traces.items() for replica, trace in enumerate(all_)]
    digests = {failures.seed: failures.digest for failures in told if not failures.replica}
    scored = []
    for arm in arms:
        own = {race.config.seed: course for race, course in zip(races, courses, strict=True) if race.arm == arm.name}
        free = free or own
        clocked = clock_config(path, comparison, arm, base)
        scale = _scale(base, clocked)
        runs = score(free, own, (clock, clocks[arm.name]), digests, comparison.target_at, scale)
        curves = [curve(course, clocks[arm.name], scale) for course in own.values()]
        scored.append(_scored(base, arm, clocked, clocks[arm.name], runs, curves))
    return Compared(
        name=base.name,
        clock=comparison.clock or str(path),
        steps=base.train.steps,
        stages=base.pipeline.stages,
        target_at=comparison.target_at,
        hourly=comparison.trace.hourly,
        failures=[failures for failures in told if not failures.replica],
        further=[failures for failures in told if failures.replica],
        arms=scored,
    )


def _failures(seed: int, replica: int, trace: Trace) -> Failures:
    faults = [(fault.step, fault.stage) for fault in trace.faults]
    return Failures(seed=seed, digest=digest(trace), faults=faults, replica=replica)


def _scale(raced: RunConfig, clocked: RunConfig) -> float:
    """Parameters of a block stage of the model that the clock is for, over those of the raced one."""
    ours, theirs = (stage_parameters(c.model, c.pipeline.stages, 1) for c in (raced, clocked))
    return theirs / ours


def _scored(
    base: RunConfig,
    arm: Arm,
    clocked: RunConfig,
    clock: Clock,
    runs: list[Run],
    curves: list[list[tuple[float, float]]],
) -> Scored:
    """An arm's runs, and what its copies cost in the model that the clock is for; further replicas are copies too."""
    copies, memory = step_bytes_and_memory(clocked) if arm.faults else (0.0, 0.0)
    memory += arm.config.exchange.replicas / base.exchange.replicas - 1.0
    sent = copies + exchanged_bytes(clocked)
    return Scored(
        name=arm.name,
        changes=_changes(base, arm.config),
        faults=arm.faults,
        routing=arm.config.routing.kind,
        runs=runs,
        step_s=clock.step_s,
        save_s=clock.save_s,
        step_bytes=sent,
        traffic=sent / _activation_bytes(clocked),
        memory=memory,
        workers=clock.workers,
        curves=curves,
    )


def _activation_bytes(config: RunConfig) -> int:
    """Bytes of activations and gradients that one step sends over all links."""
    pipeline = config.pipeline
    plan = Itinerary(config).training(0)
    return sum(simulate(plan, UNIT, message_bytes(config.model, pipeline)).sent_bytes.values())


def _changes(base: RunConfig, config: RunConfig) -> dict[str, str]:
    """The settings in which an arm differs from the recipe."""
    one, other = recipe.flat(base), recipe.flat(config)
    return {name: str(value) for name, value in other.items() if one.get(name) != value and name != "name"}
