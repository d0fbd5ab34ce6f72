"""Does ``planaria advise`` pick the winner, and its hours, where it was not fitted?

Eight settings whose failure rates, bandwidths, times of replacement and seeds are none of those that experience was
taken from. In each, the ways of coping are raced to the fault-free loss, and their hours held against the predicted
ones. Redundant and checkpoint arms are not trained again: the first has the fault-free losses bit for bit, the second
the fault-free losses at the ticks that a rollback takes, tick for tick (``tests/engine``, ``benchmarks/rollback``).
Chains that end in ``checkpoint`` are raced with one every few steps, so that a rollback there costs few; their hours
count the saves, and the steps that a rollback loses, at the interval that the advice chose for them.
The claim: the right winner in 7 of 8, hours within 15 %.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT, RUNS, Claim, Row, conclude, parser, start
from planaria import shipped
from planaria.api.arm_clocks import clock_config
from planaria.chaos.generating import per_step_probability
from planaria.commands.advise import experience
from planaria.compare.clock import Clock, clock_of
from planaria.compare.experience import Experience, Observation, learn, way_of
from planaria.compare.predict import Failures, Prediction, is_known, predict, ways
from planaria.compare.race import Course
from planaria.compare.race_job import Race, run_races
from planaria.compare.race_results import Compared, loss_at, ticks_to
from planaria.compare.race_spec import Arm, Comparison, load, trace_for
from planaria.config import RunConfig
from planaria.data.shards import prepare
from planaria.observe.live.jobs_progress import JobsProgress
from planaria.recovery.checkpoint import rollback

NAME = "advice"
EXPERIENCE = ROOT / "src" / "planaria" / "compare" / "experience.json"
TRAINED = ("checkfree", "checkfree_plus", "echo (2 bits)")


@dataclass(frozen=True)
class Setting:
    """One set of circumstances."""

    name: str
    hourly: float
    network: Mapping[str, float]


SETTINGS = [
    Setting("7 % an hour", 0.07, {}),
    Setting("20 % an hour", 0.20, {}),
    Setting("28 % an hour", 0.28, {}),
    Setting("12 %, links of 100 Mbit/s", 0.12, {"bandwidth": 12.5e6}),
    Setting("12 %, store at 40 Gbit/s", 0.12, {"store_bandwidth": 5e9}),
    Setting("20 %, store at 50 Mbit/s", 0.20, {"store_bandwidth": 6.25e6}),
    Setting("28 %, replacements in 10 minutes", 0.28, {"replacement_s": 600.0}),
    Setting("7 %, links of 10 Gbit/s, store at 40 Gbit/s", 0.07, {"bandwidth": 1.25e9, "store_bandwidth": 5e9}),
]
LESSONS = (0.05, 0.10, 0.16, 0.33)
"""failures an hour in the races that experience is taken from, on seeds of their own"""


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--recipe", type=Path, default=shipped.find("recovery"))
    flags.add_argument("--seeds", type=int, nargs="+", default=[7, 8])
    flags.add_argument("--steps", type=int, default=0, help="ticks of each race; the recipe's unless given")
    flags.add_argument(
        "--learn", type=Path, metavar="FILE", help="take experience from this comparison.json and from races, and stop"
    )
    flags.add_argument("--lessons", type=int, nargs="+", default=[5, 6], metavar="SEED", help="seeds of those races")
    given = flags.parse_args()
    if given.learn:
        return relearn(given)
    comparison, arms = load(given.recipe, {"train.steps": str(given.steps)} if given.steps else {})
    courses = raced(given.seeds, sorted({setting.hourly for setting in SETTINGS}), comparison, arms[0].config)
    rows, right, errors = [], 0, []
    for setting in SETTINGS:
        row, won, off = judged(given, comparison, arms[0].config, setting, courses)
        rows.append(row)
        right += won
        errors += off
    rows.append(Row(f"right winner in {right} of {len(SETTINGS)}", [right], "all", Claim(low=7)))
    rows.append(Row("hours, predicted off by, %", errors, "0", Claim(high=15.0), judged="worst"))
    return conclude(NAME, given, rows, ["hours of all ways, predicted over raced; winners by mean over seeds"])


def relearn(given: argparse.Namespace) -> int:
    """Write what a comparison and the races of some seeds teach into the package."""
    found = Compared.model_validate_json(given.learn.read_bytes())
    learnt = learn(found, f"{found.name}, seeds {', '.join(str(one.seed) for one in found.failures)}")
    comparison, arms = load(given.recipe, {})
    courses = raced(given.lessons, LESSONS, comparison, arms[0].config)
    more = [
        seen
        for (name, rate, seed), course in courses.items()
        if rate and (seen := lesson(name, course, *_target(comparison, courses, seed), learnt))
    ]
    rates = ", ".join(f"{100 * rate:g}" for rate in LESSONS)
    source = f"races at {rates} % an hour, seeds {', '.join(map(str, given.lessons))}"
    learnt = Experience(sources=[*learnt.sources, source], swapped=learnt.swapped, observed=[*learnt.observed, *more])
    EXPERIENCE.write_text(learnt.model_dump_json(indent=1) + "\n")
    for way, curve in learnt.curves.items():
        print(f"{way}: {curve.scale:.3g} · rate ^ {curve.power:.2f}, {curve.low:.2f} to {curve.high:.2f} of it")
    return 0


def lesson(name: str, course: Course, steps: float, target: float, learnt: Experience) -> Observation | None:
    """What one race teaches of its first strategy: the failures that it mended, and the steps that rollbacks did not
    take; None if the target was missed."""
    ticks = ticks_to(course.points, target)
    if ticks is None:
        return None
    met = [one for one in course.met if one.tick < ticks]
    mended = [one for one in met if not one.rolled_back]
    useful = ticks - sum(one.steps_lost for one in met)
    alone = steps * (learnt.swapped.mean if "plus" in name else 1.0)
    strategy, _, bits = name.partition(" (")
    way = way_of(strategy, int(bits.partition(" ")[0] or 8))
    return Observation(way=way, rate=len(mended) / useful, extra=useful / alone - 1)


def raced(
    seeds: Sequence[int], rates: Sequence[float], comparison: Comparison, base: RunConfig
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
    found = {}
    for rate in sorted({key[1] for key in keys}):
        chosen = {key: race for key, race in zip(keys, races, strict=True) if key[1] == rate}
        folder = RUNS / NAME / f"{100 * rate:g}"
        courses = run_races(list(chosen.values()), folder, comparison, JobsProgress(quiet=True))
        found |= dict(zip(chosen, courses, strict=True))
        print(f"raced at {100 * rate:g} % an hour", flush=True)
    return found


FALLBACK = 5
"""steps between the checkpoints that back up CheckFree's outer stages, in all races alike"""


def judged(
    given: argparse.Namespace,
    comparison: Comparison,
    base: RunConfig,
    setting: Setting,
    courses: Mapping[tuple[str, float, int], Course],
) -> tuple[Row, int, list[float]]:
    """A setting's row, whether the predicted winner won, and by how many per cent each way's hours were off."""
    predicted, measured = {}, {}
    clocks = ways(_circumstances(given, comparison, base, setting))
    rate = per_step_probability(setting.hourly, comparison.trace.step_s)
    failures = Failures(rate, frozenset(range(1, base.pipeline.stages + 1)))
    for name, config in clocks.items():
        if (name.startswith("echo") and name not in TRAINED) or not is_known(config, experience()):
            continue
        clock = clock_of(config)
        useful = config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})})
        prediction = predict(name, useful, clock, failures, experience())
        hours = [_hours(name, comparison, base, setting, courses, seed, clock, prediction) for seed in given.seeds]
        steps = [_target(comparison, courses, seed)[0] for seed in given.seeds]
        if all(value is not None for value in hours):
            measured[name] = statistics.fmean(value for value in hours if value is not None)
            predicted[name] = prediction.hours.mean * statistics.fmean(steps)
    expected, won = min(predicted, key=lambda n: predicted[n]), min(measured, key=lambda n: measured[n])
    off = [100 * abs(predicted[name] / measured[name] - 1) for name in measured]
    beside = {"predicted": expected, "won": won} | {
        name: f"{predicted[name]:.1f} / {measured[name]:.1f}" for name in sorted(measured)
    }
    return Row(setting.name, off, "0 % off", beside=beside, judged="worst"), int(expected == won), off


def _circumstances(given: argparse.Namespace, comparison: Comparison, base: RunConfig, setting: Setting) -> RunConfig:
    config = clock_config(given.recipe, comparison, Arm(name="", config=base), base)
    network = config.network.model_copy(update={**setting.network, "hourly": setting.hourly})
    return config.model_copy(update={"network": network})


def _target(comparison: Comparison, courses: Mapping[tuple[str, float, int], Course], seed: int) -> tuple[float, float]:
    """Ticks and loss of the fault-free arm at the target."""
    free = courses["fault-free", 0.0, seed]
    target = loss_at(free.points, comparison.target_at * free.ticks)
    ticks = ticks_to(free.points, target)
    assert ticks is not None
    return ticks, target


def _hours(
    name: str,
    comparison: Comparison,
    base: RunConfig,
    setting: Setting,
    courses: Mapping[tuple[str, float, int], Course],
    seed: int,
    clock: Clock,
    prediction: Prediction,
) -> float | None:
    """Hours to the target of one way with one seed; None if it did not get there."""
    steps, target = _target(comparison, courses, seed)
    scale = clock.donated_s * clock.bandwidth / (4 * _block_parameters(base))
    if name in TRAINED:
        course = courses[name, setting.hourly, seed]
        ticks = ticks_to(course.points, target)
        return None if ticks is None else _raced_hours(course, ticks, clock, scale, prediction.interval)
    spec = comparison.trace.model_copy(update={"hourly": setting.hourly})
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
    from planaria.model.families import stage_parameters

    return stage_parameters(config.model, config.pipeline.stages, 1)


if __name__ == "__main__":
    start(main)
