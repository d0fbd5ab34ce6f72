"""Advice on recovery strategies: whether it names the winner, and whether rankings hold at larger models."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

from pydantic import ValidationError

from benchmarks import common
from benchmarks.common import ROOT, RUNS, Claim, Row, conclude, parser, start
from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.data.shards import prepare
from planaria.faults.generating import per_step_probability
from planaria.lab.commands.advise import experience
from planaria.lab.compare.advice import Failures, Prediction, doubt, far, may_be_as_good, predict, ways
from planaria.lab.compare.clock import Clock, clock_of
from planaria.lab.compare.experience import Experience, Observation, Range, learn, swapping
from planaria.lab.compare.race import Course
from planaria.lab.compare.race_job import Race, run_races
from planaria.lab.compare.race_results import Compared, loss_at, ticks_to
from planaria.lab.compare.race_spec import Arm, Comparison, load, trace_for
from planaria.lab.comparing import clock_config
from planaria.models.families import parameters
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


ADVICE_NAME = "advice"
EXPERIENCE = ROOT / "src" / "planaria" / "compare" / "experience.json"


@dataclass(frozen=True)
class Setting:
    """One set of circumstances."""

    name: str
    hourly: float
    network: Mapping[str, float]
    recipe: str = "recovery"


SETTINGS = [
    Setting("7 % an hour", 0.07, {}),
    Setting("20 % an hour", 0.20, {}),
    Setting("28 % an hour", 0.28, {}),
    Setting("12 %, links of 100 Mbit/s", 0.12, {"bandwidth": 12.5e6}),
    Setting("12 %, store at 40 Gbit/s", 0.12, {"store_bandwidth": 5e9}),
    Setting("20 %, store at 50 Mbit/s", 0.20, {"store_bandwidth": 6.25e6}),
    Setting("28 %, replacements in 10 minutes", 0.28, {"replacement_s": 600.0}),
    Setting("7 %, links of 10 Gbit/s, store at 40 Gbit/s", 0.07, {"bandwidth": 1.25e9, "store_bandwidth": 5e9}),
    Setting("larger, 12 %", 0.12, {}, "race_large"),
    Setting("larger, 24 %", 0.24, {}, "race_large"),
    Setting("larger, 12 %, store at 40 Gbit/s", 0.12, {"store_bandwidth": 5e9}, "race_large"),
    Setting("larger, 24 %, links of 100 Mbit/s", 0.24, {"bandwidth": 12.5e6}, "race_large"),
]
LESSONS = (0.05, 0.10, 0.16, 0.33)
"""failures an hour in the races that experience is taken from, on seeds of their own"""


def run_advice() -> int:
    """Does ``planaria advise`` pick the winner, and its hours, where it was not fitted?

    Twelve settings, four of them with a model eight times as large, whose failure rates, bandwidths, times of
    replacement and seeds are none of those that experience was taken from. In each, the ways of coping are raced to the
    fault-free loss, and their hours held against the predicted ones. Redundant and checkpoint arms are not trained
    again: the first has the fault-free losses bit for bit, the second the fault-free losses at the ticks that a
    rollback takes, tick for tick (``tests/engine``, ``benchmarks/rollback``). Chains that end in ``checkpoint`` are
    raced with one every few steps, so that a rollback there costs few; their hours count the saves, and the steps that
    a rollback loses, at the interval that the advice chose for them.

    A winner is right if it is the one that is advised, or among those that advice names as perhaps as good; a way of
    which advice says that it was not raced at this size can win like any other, and then the advice was wrong. Claimed:
    right in 11 of 12, the worst hours of a setting within 15 % in 10 of 12, and 80 % of raced hours within the range
    told, both of those ways that advice ranks; of the others, what it would have said is told too.

    ``--learn`` writes what comparisons teach into the package: those of ``recovery``, ``race_small``, ``race_large``
    and ``race_gpu`` in ``results``.
    """
    flags = parser(ADVICE_NAME, run_advice.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9, 10])
    flags.add_argument("--steps", type=int, default=0, help="ticks of each race; the recipes' unless given")
    flags.add_argument(
        "--learn",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="take experience from these comparisons and races, and stop",
    )
    flags.add_argument("--lessons", type=int, nargs="*", default=[5, 6], metavar="SEED", help="seeds of those races")
    given = flags.parse_args()
    if given.learn:
        return relearn(given)
    rows, found = [], []
    for name in dict.fromkeys(setting.recipe for setting in SETTINGS):
        settings = [setting for setting in SETTINGS if setting.recipe == name]
        comparison, base = recipe_of(given, name)
        courses = raced(given.seeds, sorted({setting.hourly for setting in settings}), comparison, base, name)
        for setting in settings:
            row, judgement = judged(given, comparison, base, setting, courses)
            rows.append(row)
            found.append(judgement)
    right, count = sum(one.right for one in found), len(found)
    near = sum(one.worst <= 15.0 for one in found)
    within = [inside for one in found for inside in one.within]
    rows += [
        Row(f"right winner, or one named as perhaps as good, in {right} of {count}", [right], "all", Claim(low=11)),
        Row("the advised way won", [sum(one.won for one in found)], "all"),
        Row("ways named as perhaps as good, mean of settings", [statistics.fmean(one.rivals for one in found)], "0"),
        Row(f"settings with all hours within 15 %: {near} of {count}", [near], "all", Claim(low=10)),
        Row("hours of the advised way, % more than the winner's: each setting", [one.more for one in found], "0"),
        Row("hours, predicted off by, %: worst of a setting", [one.worst for one in found], "0"),
        Row(
            "raced hours within the range told, of ways that need experience",
            [statistics.fmean(within)],
            "1",
            Claim(0.8),
        ),
    ]
    return conclude(ADVICE_NAME, given, rows, ["hours of all ways, predicted over raced; winners by mean over seeds"])


@dataclass(frozen=True)
class Judgement:
    """Of the advice for one setting."""

    won: bool
    """the advised way"""
    right: bool
    rivals: int
    worst: float
    """per cent that a way's hours were off"""
    within: list[float]
    """1 for each way that needed experience whose raced hours were within the range told, else 0"""
    more: float
    """per cent of hours that the advised way took more than the winner"""


def relearn(given: argparse.Namespace) -> int:
    """Write what comparisons and the races of some seeds teach into the package; without seeds, beside those known."""
    given.steps = 0
    known = experience()
    swapped, observed = known.swapped, dict(known.observed)
    for file in given.learn:
        found = Compared.model_validate_json(file.read_bytes())
        size = size_of(recipe_of(given, found.name)[1])
        source = f"{found.name}, seeds {', '.join(str(one.seed) for one in found.failures)}"
        observed = {old: seen for old, seen in observed.items() if not old.startswith(f"{found.name}, ")}
        observed[source] = learn(found, source, size)
        if any(arm.routing == "swapped" and not arm.faults for arm in found.arms):
            swapped = swapping(found, source, size)
    learnt = Experience(swapped=swapped, observed=observed)
    if given.lessons:
        learnt = taught(given, learnt)
    EXPERIENCE.write_text(learnt.model_dump_json(indent=1) + "\n")
    for way, curve in learnt.curves.items():
        beside = f"{curve.low:+.3f} to {curve.high:+.3f}, {curve.races} races, up to {curve.most:.3f} failures a step"
        print(f"{way}: {curve.scale:.3g} · rate ^ {curve.power:.2f}, {beside}")
    return 0


def taught(given: argparse.Namespace, learnt: Experience) -> Experience:
    """With what races at further failure rates teach."""
    comparison, base = recipe_of(given, "recovery")
    courses = raced(given.lessons, LESSONS, comparison, base, "recovery-lessons")
    seen = [
        lesson(name, course, *target_of(comparison, courses, seed), learnt, size_of(base))
        for (name, rate, seed), course in courses.items()
        if rate
    ]
    rates = ", ".join(f"{100 * rate:g}" for rate in LESSONS)
    source = f"races at {rates} % an hour, seeds {', '.join(map(str, given.lessons))}"
    return learnt.model_copy(update={"observed": learnt.observed | {source: [one for one in seen if one]}})


def size_of(base: RunConfig) -> int:
    return parameters(base.model, base.pipeline.stages)


def lesson(name: str, course: Course, steps: float, target: float, learnt: Experience, size: int) -> Observation | None:
    """What one race teaches of its first strategy: the failures that it mended, and the steps that rollbacks did not
    take; None if the target was missed."""
    ticks = ticks_to(course.points, target)
    if ticks is None:
        return None
    met = [one for one in course.met if one.tick < ticks]
    mended = [one for one in met if not one.rolled_back]
    useful = ticks - sum(one.steps_lost for one in met)
    alone = steps * (learnt.swapped.mean if "plus" in name else 1.0)
    return Observation(way=name, rate=len(mended) / useful, extra=useful / alone - 1, parameters=size)


def judged(
    given: argparse.Namespace,
    comparison: Comparison,
    base: RunConfig,
    setting: Setting,
    courses: Courses,
) -> tuple[Row, Judgement]:
    """A setting's row, and what became of the advice for it."""
    predicted: dict[str, Range] = {}
    measured: dict[str, float] = {}
    arithmetic = set()
    clocks = ways(_circumstances(comparison, base, setting))
    unknown: dict[str, str] = {}
    known, size = experience(), size_of(base)
    rate = per_step_probability(setting.hourly, comparison.trace.step_s)
    failures = Failures(rate, frozenset(range(1, base.pipeline.stages + 1)))
    for name, config in clocks.items():
        if (name.startswith("echo") and name not in TRAINED) or doubt(config, failures, known):
            continue
        clock = clock_of(config)
        useful = config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})})
        prediction = predict(name, useful, clock, failures, known)
        hours = [
            hours_of(name, comparison, base, setting.hourly, courses, seed, clock, prediction) for seed in given.seeds
        ]
        steps = statistics.fmean(target_of(comparison, courses, seed)[0] for seed in given.seeds)
        if all(value is not None for value in hours):
            measured[name] = statistics.fmean(value for value in hours if value is not None)
            if far(config, failures, known, size):
                unknown[name] = f"{prediction.hours.mean * steps:.1f} / {measured[name]:.1f}"
                continue
            told = prediction.hours
            predicted[name] = Range(mean=told.mean * steps, low=told.low * steps, high=told.high * steps)
            arithmetic |= {name} if prediction.certain else set()
    expected, won = min(predicted, key=lambda n: predicted[n].mean), min(measured, key=lambda n: measured[n])
    rivals = [n for n in predicted if n != expected and may_be_as_good(predicted[n], predicted[expected])]
    off = [100 * abs(told.mean / measured[name] - 1) for name, told in predicted.items()]
    within = [
        float(told.low <= measured[name] <= told.high) for name, told in predicted.items() if name not in arithmetic
    ]
    beside = {"predicted": expected, "perhaps as good": ", ".join(rivals), "won": won}
    for name, told in sorted(predicted.items()):
        beside[name] = f"{told.mean:.1f} [{told.low:.1f} … {told.high:.1f}] / {measured[name]:.1f}"
    beside |= {f"not known: {name}": hours for name, hours in unknown.items()}
    row = Row(setting.name, off, "0 % off", beside=beside, judged="worst")
    more = 100 * (measured[expected] / measured[won] - 1)
    return row, Judgement(expected == won, won in {expected, *rivals}, len(rivals), max(off), within, more)


def _circumstances(comparison: Comparison, base: RunConfig, setting: Setting) -> RunConfig:
    config = clock_config(shipped.find(setting.recipe), comparison, Arm(name="", config=base), base)
    network = config.network.model_copy(update={**setting.network, "hourly": setting.hourly})
    return config.model_copy(update={"network": network})


RACE_SIZES_NAME = "race_sizes"
OF = ("hours", "ticks")


class Size(NamedTuple):
    """What one size of the model says of two arms."""

    parameters: float
    logs: Sequence[float]
    """for each seed, ln(first ÷ second)"""


class Expected(NamedTuple):
    """Of ln(first ÷ second) at some size."""

    mean: float
    error: float
    """of the mean"""
    freedom: float

    @property
    def first_is_quicker(self) -> float:
        """Probability that the mean is below 0."""
        from scipy.stats import t

        return float(t.cdf(-self.mean / self.error, self.freedom)) if self.error else float(self.mean < 0)


def expected(small: Size, large: Size, at: float) -> Expected:
    """The line through both sizes' means at ``at`` parameters.

    m = Σ w_i · mean_i with w the weights of the line's ends; its variance is Σ v_i with v_i = w_i² s_i² / n_i, its
    degrees of freedom are (Σ v_i)² / Σ (v_i² / (n_i − 1)).
    """
    share = math.log(at / small.parameters) / math.log(large.parameters / small.parameters)
    ends = ((1 - share, small), (share, large))
    errors = [w**2 * variance(size.logs) / len(size.logs) for w, size in ends]
    below = sum(v**2 / (len(size.logs) - 1) for v, (_, size) in zip(errors, ends, strict=True))
    mean = sum(w * fmean(size.logs) for w, size in ends)
    return Expected(mean, math.sqrt(sum(errors)), sum(errors) ** 2 / below if below else math.inf)


def interval(line: Expected, logs: Sequence[float]) -> tuple[float, float]:
    """Where the mean of further races lies with 95 %, if the line holds; ``logs`` tell how far such races scatter.

    mean ± t · √(e² + s² / n), with Welch's and Satterthwaite's degrees of freedom for the sum.
    """
    from scipy.stats import t

    own, fitted, n = variance(logs) / len(logs), line.error**2, len(logs)
    below = (fitted**2 / line.freedom if fitted else 0.0) + own**2 / (n - 1)
    half = math.sqrt(own + fitted) * float(t.ppf(0.975, (own + fitted) ** 2 / below)) if below else 0.0
    return line.mean - half, line.mean + half


def saved(names: Sequence[str]) -> list[tuple[Compared, int]]:
    """The saved races of these names, each with the parameters of its model.

    :raises UserError: naming the one that cannot be an end of the line, or cannot be held against it.
    """
    found: dict[int, Compared] = {}
    for name in names:
        record = common.saved(name)
        try:
            race = Compared.model_validate_json(json.dumps(record))
        except ValidationError as error:
            raise UserError(f"{name}: the saved result is not a comparison; name a race") from error
        config = recipe.load(shipped.find(name), {})
        count = parameters(config.model, config.pipeline.stages)
        if count in found:
            raise UserError(f"{name}: its model is as large as that of {found[count].name}; name races of three sizes")
        if len(race.failures) < 2:
            raise UserError(f"{name}: one seed says nothing of how far seeds scatter; race more")
        found[count] = race
    return [(race, count) for count, race in found.items()]


def size(found: Compared, count: int, pair: tuple[str, str], of: str) -> Size:
    arms = {arm.name: arm for arm in found.arms}
    runs = zip(*(arms[name].runs for name in pair), strict=True)
    both = [(getattr(a, of), getattr(b, of)) for a, b in runs]
    logs = [math.log(a / b) for a, b in both if a is not None and b is not None]
    if len(logs) < 2:
        raise UserError(
            f"{found.name}: {pair[0]} and {pair[1]} reached the target together with too few seeds; race more"
        )
    return Size(count, logs)


def compared(races: Sequence[Compared]) -> Iterator[tuple[str, tuple[str, str]]]:
    """What is counted, and the arms that all races have, two at a time."""
    first, *others = ([arm.name for arm in race.contestants if not arm.alike] for race in races)
    names = [name for name in first if all(name in other for other in others)]
    return ((of, pair) for of in OF for pair in combinations(names, 2))


def lines(races: Sequence[tuple[Compared, int]]) -> Iterator[Row]:
    """The first arm over the second at the two sizes, and how sure the line is of their order at all three."""
    (small, few), (large, many), _ = races
    for of, pair in compared([small, large]):
        ends = size(small, few, pair, of), size(large, many, pair, of)
        sure = {f"{n / 1e6:.3g} M": round(expected(*ends, n).first_is_quicker, 3) for _, n in races}
        means = [math.exp(fmean(one.logs)) for one in ends]
        yield Row(f"{told(of, pair)}, small and large", means, "equal: 1", None, sure)


def measured(races: Sequence[tuple[Compared, int]]) -> Iterator[Row]:
    """The same at the third size, by its own race, beside what the line expects there."""
    for of, pair in compared([found for found, _ in races]):
        small, large, third = (size(found, count, pair, of) for found, count in races)
        line = expected(small, large, third.parameters)
        low, high = (math.exp(end) for end in interval(line, third.logs))
        ratios = [math.exp(one) for one in third.logs]
        what = f"{told(of, pair)}, measured at {third.parameters / 1e6:.3g} M"
        beside = {"least": round(min(ratios), 3), "most": round(max(ratios), 3), "seeds": len(ratios)}
        limit = f"by the line: {math.exp(line.mean):.3f}"
        yield Row(what, [math.exp(fmean(third.logs))], limit, Claim(low=round(low, 3), high=round(high, 3)), beside)


def told(of: str, pair: tuple[str, str]) -> str:
    return f"{'hours' if of == 'hours' else 'steps'}: {pair[0]} over {pair[1]}"


def run_race_sizes() -> int:
    """Does the order of strategies hold at larger models? A line through the two sizes of the race, and how sure it is.

    Read from the saved races (``race_small``, ``race_large`` and ``race_gpu`` in ``results/race.json``), nothing is
    trained. For two arms, each seed of a size says ln(hours of one ÷ hours of the other), on the same failures. The
    means of the two sizes lie on a line over the logarithm of the model's parameters; at a third size, ten times the
    larger one, the line says what to expect. A mean's error is Student's, with the degrees of freedom of Welch and
    Satterthwaite for a sum of two unlike errors. What is told is the probability that the first arm is the quicker one,
    by this fit: the line is assumed.

    A third race, of a model of that size, was run when the line had been drawn: what it measured is told beside what
    the line expects of it, the line's errors and the race's own added. All races meet the same failures with the same
    seed, and three pairs of arms are not independent: both are left out of the errors.

    The claim: the means of the third race lie within the 95 % that the line expects.
    """
    flags = parser(RACE_SIZES_NAME, run_race_sizes.__doc__)
    flags.add_argument("--races", nargs=2, metavar=("SMALL", "LARGE"), default=["race_small", "race_large"])
    flags.add_argument("--then", metavar="LARGER", default="race_gpu", help="the race that the line is held against")
    given = flags.parse_args()
    races = saved([*given.races, given.then])
    notes = [
        "columns of parameters: the probability that the first arm is the quicker one, by the line through both races",
        "claims: where the line and the scatter of the race's own seeds expect its mean with 95 %",
    ]
    return conclude(RACE_SIZES_NAME, given, [*lines(races), *measured(races)], notes)


if __name__ == "__main__":
    start(advice=run_advice, race_sizes=run_race_sizes)
