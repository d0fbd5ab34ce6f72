"""The races that advice is learned from, and judged by: each way of coping, at each failure rate, with each seed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from benchmarks.common import RUNS
from planaria.config import shipped
from planaria.config.schema import RunConfig
from planaria.data.shards import prepare
from planaria.lab.compare.clock import Clock
from planaria.lab.compare.predict import Prediction, ways
from planaria.lab.compare.race import Course
from planaria.lab.compare.race_job import Race, run_races
from planaria.lab.compare.race_results import loss_at, ticks_to
from planaria.lab.compare.race_spec import Comparison, load, trace_for
from planaria.recovery.checkpoint import rollback
from planaria.report.live.jobs_progress import JobsProgress

Courses = Mapping[tuple[str, float, int], Course]
"""by way, failures an hour and seed; the fault-free one has the rate 0"""

TRAINED = ("checkfree", "checkfree_plus", "echo (2 bits)", "echo (8 bits)")
FALLBACK = 5
"""steps between the checkpoints that back up CheckFree's outer stages, in all races alike"""


def recipe_of(given: argparse.Namespace, name: str) -> tuple[Comparison, RunConfig]:
    """All block stages fail, whoever is exempt in the race of that name."""
    comparison, arms = load(shipped.find(name), {"train.steps": str(given.steps)} if given.steps else {})
    trace = comparison.trace.model_copy(update={"exempt": ()})
    return comparison.model_copy(update={"trace": trace}), arms[0].config


def raced(
    seeds: Sequence[int], rates: Sequence[float], comparison: Comparison, base: RunConfig, of: str
) -> dict[tuple[str, float, int], Course]:
    """The courses that must be trained: (way, failure rate, seed); the fault-free one has the rate 0."""
    dataset = prepare(base.data, base.model.vocab)
    races, keys = [], []
    for seed in seeds:
        config = base.model_copy(update={"seed": seed})
        for rate in (0.0, *rates):
            spec = comparison.trace.model_copy(update={"hourly": rate or 0.1})
            trace = trace_for(comparison.model_copy(update={"trace": spec}), base, seed)
            for name in TRAINED if rate else ("fault-free",):
                way = ways(config)[name] if rate else config
                if "checkpoint" in way.recovery.strategy:
                    checkpoint = way.checkpoint.model_copy(update={"every": FALLBACK})
                    way = way.model_copy(update={"checkpoint": checkpoint})
                races.append(Race(arm=name, config=way, dataset=str(dataset.folder), trace=trace, faults=bool(rate)))
                keys.append((name, rate, seed))
    found: dict[tuple[str, float, int], Course] = {}
    for rate in sorted({key[1] for key in keys}):
        chosen = {key: race for key, race in zip(keys, races, strict=True) if key[1] == rate}
        folder = RUNS / "advice" / of / f"{100 * rate:g}"
        courses = run_races(list(chosen.values()), folder, comparison, JobsProgress(quiet=True))
        found |= dict(zip(chosen, courses, strict=True))
        print(f"{of}: raced at {100 * rate:g} % an hour", flush=True)
    return found


def target_of(comparison: Comparison, courses: Courses, seed: int) -> tuple[float, float]:
    """Ticks and loss of the fault-free arm at the target."""
    free = courses["fault-free", 0.0, seed]
    target = loss_at(free.points, comparison.target_at * free.ticks)
    ticks = ticks_to(free.points, target)
    assert ticks is not None
    return ticks, target


def hours_of(
    name: str,
    comparison: Comparison,
    base: RunConfig,
    hourly: float,
    courses: Courses,
    seed: int,
    clock: Clock,
    prediction: Prediction,
) -> float | None:
    """Hours to the target of one way with one seed; None if it did not get there."""
    steps, target = target_of(comparison, courses, seed)
    scale = clock.donated_s * clock.bandwidth / (4 * _block_parameters(base))
    if name in TRAINED:
        course = courses[name, hourly, seed]
        ticks = ticks_to(course.points, target)
        return None if ticks is None else _raced_hours(course, ticks, clock, scale, prediction.interval)
    spec = comparison.trace.model_copy(update={"hourly": hourly})
    trace = trace_for(comparison.model_copy(update={"trace": spec}), base, seed)
    struck = {fault.step for fault in trace.faults}
    if name.startswith("checkpoint"):
        assert prediction.interval is not None
        done = rollback(round(steps), prediction.interval, struck, behind=clock.behind)
        each = clock.step_s / 2 + clock.replacement_s + clock.load_s
        return (done.ticks * clock.step_s + done.saves * clock.save_s + done.rollbacks * each) / 3600
    met = sum(1 for tick in struck if 0 < tick < steps)
    each = clock.step_s / 2 + clock.replacement_s + 3 * clock.donated_s
    return (steps * clock.step_s + met * each) / 3600


def _raced_hours(course: Course, ticks: float, clock: Clock, scale: float, interval: int | None) -> float:
    """Hours of a race, its saves and rollbacks as they were at checkpoints every ``interval`` steps."""
    unsaved = clock.seconds(course.model_copy(update={"saved": []}), ticks, scale)
    if interval is None:
        return unsaved / 3600
    rolled = sum(1 for met in course.met if met.rolled_back and met.tick < ticks)
    more = rolled * max(0.0, (interval - FALLBACK) / 2)
    return (unsaved + more * clock.step_s + (ticks + more) / interval * clock.save_s) / 3600


def _block_parameters(config: RunConfig) -> int:
    from planaria.models.families import stage_parameters

    return stage_parameters(config.model, config.pipeline.stages, 1)
