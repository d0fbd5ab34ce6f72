"""Advice on recovery strategies: whether it names the winner, and whether rankings hold at larger models."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

from pydantic import ValidationError

from benchmarks import harness
from benchmarks.harness import ROOT, RUNS, Claim, Flag, Measurement, Result, Row, benchmark, start
from benchmarks.rollback import rollback
from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.data.shards import tokenise_corpus
from planaria.faults.trace_generation import per_step_probability
from planaria.lab.commands.advise import experience
from planaria.lab.compare.advice import (
    FailureRate,
    Prediction,
    candidates,
    may_be_as_good,
    predict,
    why_not_covered,
    why_size_not_covered,
)
from planaria.lab.compare.clock import ArmClock, arm_clock
from planaria.lab.compare.experience import Experience, Observation, Range, SwappedSteps, strategy_of
from planaria.lab.compare.race import ArmCourse
from planaria.lab.compare.race_job import Race, run_races
from planaria.lab.compare.race_results import ArmRun, ArmScore, ComparisonResults, loss_at, ticks_to
from planaria.lab.compare.race_spec import Arm, Comparison, load, trace_for
from planaria.lab.compare.run_comparison import clock_config
from planaria.models.families import parameters, stage_parameters
from planaria.recovery import RECOVERIES
from planaria.recovery.base import Recovery
from planaria.report.observe.bars import JobsProgress

Courses = Mapping[tuple[str, float, int], ArmCourse]
"""by strategy, failures per hour and seed; the fault-free one has rate 0"""

TRAINED = ("checkfree", "checkfree_plus", "echo (2 bits)", "echo (8 bits)")
FALLBACK = 5  # steps between checkpoints that cover CheckFree's outer stages, in all races


def learn(results: ComparisonResults, source: str, size: int) -> list[Observation]:
    """Return the observations of a comparison of models with ``size`` parameters: every race with failures.

    A race counts for the first strategy of its arm's chain, relative to the fault-free arm that differs in nothing
    else. Exact strategies, controls and arms without such a partner are skipped.

    :raises UserError: when arms missed the target.
    """
    calm = [arm for arm in results.arms if not arm.faults]
    observed = []
    for arm in results.arms:
        by, first = _first(arm)
        unharmed = next((score for score in calm if score.other_changes == arm.other_changes), None)
        if arm.faults and unharmed and not first.exact and not first.control_description:
            strategy = strategy_of(by, first)
            observed += [_observation(strategy, size, arm.name, *pair, source) for pair in _pairs(arm, unharmed)]
    return observed


def swapping(results: ComparisonResults, source: str, size: int) -> SwappedSteps:
    """Return the steps to the target with swapped routes over those with full ones, without failures.

    :raises UserError: when the comparison lacks a fault-free arm with swapped routes, or arms missed the target.
    """
    free = results.arms[0]
    swapped = next((arm for arm in results.arms if arm.routing == "swapped" and not arm.faults), None)
    if swapped is None:
        raise UserError(f"{source}: no arm has swapped routing and faults = false; race one to measure its cost")
    ratios = [_ticks(run, swapped.name, source) / _ticks(own, free.name, source) for run, own in _pairs(swapped, free)]
    return SwappedSteps(mean=fmean(ratios), low=min(ratios), high=max(ratios), parameters=size)


def _first(arm: ArmScore) -> tuple[str, Recovery]:
    location = "recovery.options."
    texts = {key.removeprefix(location): value for key, value in arm.changes.items() if key.startswith(location)}
    options = {key: _value(text) for key, text in texts.items()}
    by = arm.changes.get("recovery.strategy", "checkfree").split(",")[0].strip()
    return by, RECOVERIES.make(by, RECOVERIES.declared([by], options))


def _value(text: str) -> object:
    try:
        return documents.parse_toml(f"value = {text.lower()}", "an option")["value"]
    except UserError:
        return text


def _observation(strategy: str, size: int, arm: str, run: ArmRun, unharmed: ArmRun, source: str) -> Observation:
    ticks = _ticks(run, arm, source)
    extra = ticks / _ticks(unharmed, arm, source) - 1
    return Observation(strategy=strategy, rate=run.failures / ticks, extra=extra, parameters=size)


def _pairs(score: ArmScore, other: ArmScore) -> Sequence[tuple[ArmRun, ArmRun]]:
    return list(zip(score.runs, other.runs, strict=True))


def _ticks(run: ArmRun, arm: str, source: str) -> float:
    if run.ticks is None:
        raise UserError(f"{source}: {arm} did not reach the target with seed {run.seed}; train longer, or aim lower")
    return run.ticks


def recipe_of(args: Namespace, name: str) -> tuple[Comparison, RunConfig]:
    """Load a recipe without its exemptions: all block stages fail."""
    comparison, arms = load(shipped.find(name), {"train.steps": str(args.steps)} if args.steps else {})
    trace = comparison.trace.model_copy(update={"exempt": ()})
    return comparison.model_copy(update={"trace": trace}), arms[0].config


def raced(
    seeds: Sequence[int], rates: Sequence[float], comparison: Comparison, base: RunConfig, of: str
) -> dict[tuple[str, float, int], ArmCourse]:
    """Train the courses by strategy, failure rate and seed; the fault-free one has rate 0."""
    dataset = tokenise_corpus(base.data, base.model.vocab)
    races, keys = [], []
    for seed in seeds:
        config = base.model_copy(update={"seed": seed})
        for rate in (0.0, *rates):
            spec = comparison.trace.model_copy(update={"hourly": rate or 0.1})
            trace = trace_for(comparison.model_copy(update={"trace": spec}), base, seed)
            for name in TRAINED if rate else ("fault-free",):
                way = candidates(config)[name] if rate else config
                if "checkpoint" in way.recovery.strategy:
                    checkpoint = way.checkpoint.model_copy(update={"every": FALLBACK})
                    way = way.model_copy(update={"checkpoint": checkpoint})
                races.append(Race(arm=name, config=way, dataset=str(dataset.folder), trace=trace, faults=bool(rate)))
                keys.append((name, rate, seed))
    found: dict[tuple[str, float, int], ArmCourse] = {}
    for rate in sorted({key[1] for key in keys}):
        chosen = {key: race for key, race in zip(keys, races, strict=True) if key[1] == rate}
        folder = RUNS / "advice" / of / f"{100 * rate:g}"
        courses = run_races(list(chosen.values()), folder, comparison, JobsProgress(quiet=True))
        found |= dict(zip(chosen, courses, strict=True))
        print(f"{of}: raced at {100 * rate:g} % an hour", flush=True)
    return found


def target_of(comparison: Comparison, courses: Courses, seed: int) -> tuple[float, float]:
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
    clock: ArmClock,
    prediction: Prediction,
) -> float | None:
    """Return the hours to the target of one strategy with one seed, or None if it was missed."""
    steps, target = target_of(comparison, courses, seed)
    scale = clock.donated_s * clock.bandwidth / (4 * _block_parameters(base))
    if name in TRAINED:
        course = courses[name, hourly, seed]
        ticks = ticks_to(course.points, target)
        return None if ticks is None else _raced_hours(course, ticks, clock, scale, prediction.interval)
    spec = comparison.trace.model_copy(update={"hourly": hourly})
    trace = trace_for(comparison.model_copy(update={"trace": spec}), base, seed)
    failed_ticks = {fault.step for fault in trace.faults}
    if name.startswith("checkpoint"):
        assert prediction.interval is not None
        done = rollback(round(steps), prediction.interval, failed_ticks, behind=clock.behind)
        each = clock.step_s / 2 + clock.replacement_s + clock.load_s
        return (done.ticks * clock.step_s + done.saves * clock.save_s + done.rollbacks * each) / 3600
    met = sum(1 for tick in failed_ticks if 0 < tick < steps)
    each = clock.step_s / 2 + clock.replacement_s + 3 * clock.donated_s
    return (steps * clock.step_s + met * each) / 3600


def _raced_hours(course: ArmCourse, ticks: float, clock: ArmClock, scale: float, interval: int | None) -> float:
    """Return the hours of a race, with saves and rollbacks at checkpoints every ``interval`` steps."""
    unsaved = clock.seconds(course.model_copy(update={"saved": []}), ticks, scale)
    if interval is None:
        return unsaved / 3600
    rolled = sum(1 for met in course.loss_events if met.rolled_back and met.tick < ticks)
    more = rolled * max(0.0, (interval - FALLBACK) / 2)
    return (unsaved + more * clock.step_s + (ticks + more) / interval * clock.save_s) / 3600


def _block_parameters(config: RunConfig) -> int:
    return stage_parameters(config.model, config.pipeline.stages, 1)


EXPERIENCE = ROOT / "src" / "planaria" / "lab" / "compare" / "experience.json"


@dataclass(frozen=True)
class Setting:
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
LESSONS = (0.05, 0.10, 0.16, 0.33)  # failures per hour in the races for experience, with separate seeds


@benchmark(
    "advice",
    seeds=[7, 8, 9, 10],
    steps=Flag(0, "ticks of each race; the recipes' unless given"),
    learn=Flag(None, "learn from these comparisons and races, and stop", type=Path, nargs="+", metavar="FILE"),
    lessons=Flag([5, 6], "seeds of those races", nargs="*", metavar="SEED"),
)
def run_advice(args: Namespace) -> Measurement:
    """Check whether ``planaria advise`` names the winner and its hours in settings it was not fitted to.

    Twelve settings, four with a model eight times as large; their failure rates, bandwidths, replacement times and
    seeds are new to the experience. The strategies are raced to the fault-free loss. Redundant and checkpoint arms are
    not trained: the first has the fault-free losses bit for bit, the second the fault-free losses tick for tick
    (``benchmarks.rollback``). Chains that end in ``checkpoint`` are raced with frequent checkpoints; their hours count
    saves and lost steps at the advised interval.

    A winner is right if it is advised or named as possibly equal; a strategy reported as not raced at this size can
    also win, and then the advice is wrong. Claims: right in 11 of 12; the worst hours of a setting within 15 % in 10 of
    12; 80 % of raced hours in the stated range, for ranked strategies.

    ``--learn`` writes what the comparisons ``recovery``, ``race_small``, ``race_large`` and ``race_gpu`` teach into the
    package.
    """
    if args.learn:
        return relearn(args)
    rows, found = [], []
    for name in dict.fromkeys(setting.recipe for setting in SETTINGS):
        settings = [setting for setting in SETTINGS if setting.recipe == name]
        comparison, base = recipe_of(args, name)
        courses = raced(args.seeds, sorted({setting.hourly for setting in settings}), comparison, base, name)
        for setting in settings:
            row, judgement = judged(args, comparison, base, setting, courses)
            rows.append(row)
            found.append(judgement)
    right, count = sum(one.right for one in found), len(found)
    near = sum(one.worst <= 15.0 for one in found)
    within = [inside for one in found for inside in one.within]
    rows += [
        Row(f"right winner, or one named as possibly as good, in {right} of {count}", [right], "all", Claim(low=11)),
        Row("the recommended strategy won", [sum(one.won for one in found)], "all"),
        Row("strategies named as possibly as good, mean of settings", [fmean(one.rivals for one in found)], "0"),
        Row(f"settings with all hours within 15 %: {near} of {count}", [near], "all", Claim(low=10)),
        Row("hours of the recommended strategy, % above the winner's: each setting", [one.more for one in found], "0"),
        Row("error of predicted hours, %: maximum of a setting", [one.worst for one in found], "0"),
        Row("raced hours within the predicted range, strategies with experience", [fmean(within)], "1", Claim(0.8)),
    ]
    return Result(rows, ["predicted over raced hours of all strategies; winners by mean over seeds"])


@dataclass(frozen=True)
class Judgement:
    """The advice for one setting, judged."""

    won: bool  # the advised way
    right: bool
    rivals: int
    worst: float  # largest error of a strategy's hours, %
    within: list[float]  # per strategy that needs experience: 1 if its raced hours are in the stated range, else 0
    more: float  # hours of the advised strategy above the winner's, %


def relearn(args: Namespace) -> int:
    """Learn from comparisons, and from races of ``--lessons`` seeds, and write the package's experience."""
    args.steps = 0
    known = experience()
    swapped, observed = known.swapped, dict(known.observed)
    for file in args.learn:
        found = ComparisonResults.model_validate_json(file.read_bytes())
        size = size_of(recipe_of(args, found.name)[1])
        source = f"{found.name}, seeds {', '.join(str(one.seed) for one in found.failures)}"
        observed = {old: seen for old, seen in observed.items() if not old.startswith(f"{found.name}, ")}
        observed[source] = learn(found, source, size)
        if any(arm.routing == "swapped" and not arm.faults for arm in found.arms):
            swapped = swapping(found, source, size)
    learnt = Experience(swapped=swapped, observed=observed)
    if args.lessons:
        learnt = taught(args, learnt)
    EXPERIENCE.write_text(learnt.model_dump_json(indent=1) + "\n")
    for way, curve in learnt.curves.items():
        columns = (
            f"{curve.low:+.3f} to {curve.high:+.3f}, {curve.races} races, up to {curve.max_rate:.3f} failures a step"
        )
        print(f"{way}: {curve.scale:.3g} · rate ^ {curve.power:.2f}, {columns}")
    return 0


def taught(args: Namespace, learnt: Experience) -> Experience:
    """Add observations of races at further failure rates."""
    comparison, base = recipe_of(args, "recovery")
    courses = raced(args.lessons, LESSONS, comparison, base, "recovery-lessons")
    seen = [
        lesson(name, course, *target_of(comparison, courses, seed), learnt, size_of(base))
        for (name, rate, seed), course in courses.items()
        if rate
    ]
    rates = ", ".join(f"{100 * rate:g}" for rate in LESSONS)
    source = f"races at {rates} % an hour, seeds {', '.join(map(str, args.lessons))}"
    return learnt.model_copy(update={"observed": learnt.observed | {source: [one for one in seen if one]}})


def size_of(base: RunConfig) -> int:
    return parameters(base.model, base.pipeline.stages)


def lesson(
    name: str, course: ArmCourse, steps: float, target: float, learnt: Experience, size: int
) -> Observation | None:
    """Return a race's observation: repaired failures, and steps without rollbacks; None if the target was missed."""
    ticks = ticks_to(course.points, target)
    if ticks is None:
        return None
    met = [one for one in course.loss_events if one.tick < ticks]
    repaired = [one for one in met if not one.rolled_back]
    useful = ticks - sum(one.steps_lost for one in met)
    alone = steps * (learnt.swapped.mean if "plus" in name else 1.0)
    return Observation(strategy=name, rate=len(repaired) / useful, extra=useful / alone - 1, parameters=size)


def judged(
    args: Namespace, comparison: Comparison, base: RunConfig, setting: Setting, courses: Courses
) -> tuple[Row, Judgement]:
    """Return a setting's row and the judgement of its advice."""
    predicted: dict[str, Range] = {}
    measured = {}
    arithmetic = set()
    clocks = candidates(_circumstances(comparison, base, setting))
    unknown: dict[str, str] = {}
    known, size = experience(), size_of(base)
    rate = per_step_probability(setting.hourly, comparison.trace.step_s)
    failures = FailureRate(rate, frozenset(range(1, base.pipeline.stages + 1)))
    for name, config in clocks.items():
        if (name.startswith("echo") and name not in TRAINED) or why_not_covered(config, failures, known):
            continue
        clock = arm_clock(config)
        useful = config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})})
        prediction = predict(name, useful, clock, failures, known)
        hours = [
            hours_of(name, comparison, base, setting.hourly, courses, seed, clock, prediction) for seed in args.seeds
        ]
        steps = fmean(target_of(comparison, courses, seed)[0] for seed in args.seeds)
        if all(value is not None for value in hours):
            measured[name] = fmean(value for value in hours if value is not None)
            if why_size_not_covered(config, failures, known, size):
                unknown[name] = f"{prediction.hours.mean * steps:.1f} / {measured[name]:.1f}"
                continue
            each = prediction.hours
            predicted[name] = Range(mean=each.mean * steps, low=each.low * steps, high=each.high * steps)
            arithmetic |= {name} if prediction.certain else set()
    expected, won = min(predicted, key=lambda n: predicted[n].mean), min(measured, key=lambda n: measured[n])
    rivals = [n for n in predicted if n != expected and may_be_as_good(predicted[n], predicted[expected])]
    off = [100 * abs(each.mean / measured[name] - 1) for name, each in predicted.items()]
    within = [
        float(each.low <= measured[name] <= each.high) for name, each in predicted.items() if name not in arithmetic
    ]
    columns = {"predicted": expected, "perhaps as good": ", ".join(rivals), "won": won}
    for name, each in sorted(predicted.items()):
        columns[name] = f"{each.mean:.1f} [{each.low:.1f} … {each.high:.1f}] / {measured[name]:.1f}"
    columns |= {f"not known: {name}": hours for name, hours in unknown.items()}
    row = Row(setting.name, off, "0 % off", columns=columns, judged="worst")
    more = 100 * (measured[expected] / measured[won] - 1)
    return row, Judgement(expected == won, won in {expected, *rivals}, len(rivals), max(off), within, more)


def _circumstances(comparison: Comparison, base: RunConfig, setting: Setting) -> RunConfig:
    config = clock_config(shipped.find(setting.recipe), comparison, Arm(name="", config=base), base)
    network = config.network.model_copy(update={**setting.network, "hourly_failure_probability": setting.hourly})
    return config.model_copy(update={"network": network})


OF = ("hours", "ticks")


class Size(NamedTuple):
    """Two arms at one size of the model."""

    parameters: float
    logs: Sequence[float]  # for each seed, ln(first ÷ second)


class Expected(NamedTuple):
    """Of ln(first ÷ second) at some size."""

    mean: float
    error: float  # of the mean
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


def saved(names: Sequence[str]) -> list[tuple[ComparisonResults, int]]:
    """The saved races of these names, each with the parameters of its model.

    :raises UserError: naming the one that cannot be an end of the line, or cannot be held against it.
    """
    found: dict[int, ComparisonResults] = {}
    for name in names:
        record = harness.saved(name)
        try:
            race = ComparisonResults.model_validate_json(json.dumps(record))
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


def size(found: ComparisonResults, count: int, pair: tuple[str, str], of: str) -> Size:
    arms = {arm.name: arm for arm in found.arms}
    runs = zip(*(arms[name].runs for name in pair), strict=True)
    both = [(getattr(a, of), getattr(b, of)) for a, b in runs]
    logs = [math.log(a / b) for a, b in both if a is not None and b is not None]
    if len(logs) < 2:
        raise UserError(
            f"{found.name}: {pair[0]} and {pair[1]} reached the target together with too few seeds; race more"
        )
    return Size(count, logs)


def compared(races: Sequence[ComparisonResults]) -> Iterator[tuple[str, tuple[str, str]]]:
    first, *others = ([arm.name for arm in race.contestants if not arm.other_changes] for race in races)
    names = [name for name in first if all(name in other for other in others)]
    return ((of, pair) for of in OF for pair in combinations(names, 2))


def lines(races: Sequence[tuple[ComparisonResults, int]]) -> Iterator[Row]:
    """The first arm over the second at two sizes, and the line's probabilities at all three."""
    (small, few), (large, many), _ = races
    for of, pair in compared([small, large]):
        ends = size(small, few, pair, of), size(large, many, pair, of)
        sure = {f"{n / 1e6:.3g} M": round(expected(*ends, n).first_is_quicker, 3) for _, n in races}
        means = [math.exp(fmean(one.logs)) for one in ends]
        yield Row(f"{titled(of, pair)}, small and large", means, "equal: 1", None, sure)


def measured(races: Sequence[tuple[ComparisonResults, int]]) -> Iterator[Row]:
    """The third size's ratio in its own race, compared with the line's prediction."""
    for of, pair in compared([found for found, _ in races]):
        small, large, third = (size(found, count, pair, of) for found, count in races)
        line = expected(small, large, third.parameters)
        low, high = (math.exp(end) for end in interval(line, third.logs))
        ratios = [math.exp(one) for one in third.logs]
        what = f"{titled(of, pair)}, measured at {third.parameters / 1e6:.3g} M"
        columns = {"least": round(min(ratios), 3), "most": round(max(ratios), 3), "seeds": len(ratios)}
        limit = f"by the line: {math.exp(line.mean):.3f}"
        yield Row(what, [math.exp(fmean(third.logs))], limit, Claim(low=round(low, 3), high=round(high, 3)), columns)


def titled(of: str, pair: tuple[str, str]) -> str:
    return f"{'hours' if of == 'hours' else 'steps'}: {pair[0]} over {pair[1]}"


@benchmark(
    "race_sizes",
    races=Flag(["race_small", "race_large"], nargs=2, metavar=("SMALL", "LARGE")),
    then=Flag("race_gpu", "the race that the line predicts", metavar="LARGER"),
)
def run_race_sizes(args: Namespace) -> Measurement:
    """Check whether the ranking of strategies holds at larger models, by a line through two sizes of the race.

    Reads the saved races ``race_small``, ``race_large`` and ``race_gpu``; nothing is trained. Per pair of arms, each
    seed of a size gives ln(hours of one ÷ hours of the other) under the same failures. The means of two sizes define a
    line over the logarithm of the parameters, which predicts a third size, ten times the larger. Errors are Student's
    with Welch's and Satterthwaite's degrees of freedom; shown is the probability that the first arm is faster, given
    the line. A third race of that size was run after the line was fixed. Neither the shared failures per seed nor the
    dependence of the three pairs is part of the errors.

    Claim: the means of the third race lie within the line's 95 % interval.
    """
    races = saved([*args.races, args.then])
    notes = [
        "columns of parameters: the probability that the first arm is the quicker one, by the line through both races",
        "claims: where the line and the scatter of the race's own seeds expect its mean with 95 %",
    ]
    return Result([*lines(races), *measured(races)], notes)


if __name__ == "__main__":
    start(advice=run_advice, race_sizes=run_race_sizes)
