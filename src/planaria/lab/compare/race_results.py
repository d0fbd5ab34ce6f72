"""Results of a comparison: every arm with every seed, until it reaches the target loss. Pure arithmetic on courses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from planaria.common.documents import Record, former_names
from planaria.lab.compare.clock import ArmClock
from planaria.lab.compare.race import ArmCourse, ValidationPoint
from planaria.lab.compare.race_spec import SMOOTHING_WINDOW
from planaria.trials.spread import Spread, bootstrap, spread

MIN_SEEDS = 5
"""minimum number of seeds for which an interval of their mean is reported"""


def smoothed_losses(points: Sequence[ValidationPoint]) -> list[tuple[float, float]]:
    """Return (tick, loss): each validation as the mean of the last :data:`SMOOTHING_WINDOW`, where that many exist."""
    means = []
    for last in range(SMOOTHING_WINDOW, len(points) + 1):
        window = points[last - SMOOTHING_WINDOW : last]
        means.append((float(window[-1].tick), statistics.fmean(point.loss for point in window)))
    return means


def ticks_to(points: Sequence[ValidationPoint], target: float) -> float | None:
    """Return the ticks until the smoothed loss first is at most ``target``, linearly interpolated; or None."""
    before: tuple[float, float] | None = None
    for tick, loss in smoothed_losses(points):
        if loss <= target:
            if before is None or before[1] <= loss:
                return tick
            return before[0] + (tick - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (tick, loss)
    return None


def loss_at(points: Sequence[ValidationPoint], tick: float) -> float:
    """Return the smoothed loss at the last validation not after ``tick``.

    :raises ValueError: when there is none that early.
    """
    past = [loss for at, loss in smoothed_losses(points) if at <= tick]
    if not past:
        raise ValueError(f"no smoothed validation by tick {tick:g}: validate more often, or run longer")
    return past[-1]


class ArmRun(Record):
    """One arm with one seed."""

    seed: int
    trace: str
    """digest of the failures of the arm's first replica"""
    target: float
    """loss to reach, nats"""
    ticks: float | None
    """ticks to the target, or None if it was missed"""
    hours: float | None
    """hours to the target by the arm's clock"""
    ratio: float | None
    """ticks over the fault-free arm's with the same seed"""
    reset_ratio: float | None = None
    """ticks over those of the control that loses moments alone, with the same seed, or None without it"""
    hours_ratio: float | None
    machine_hours: float | None = None
    """hours times the machines that train"""
    final: float | None
    """last smoothed loss, or None if the arm stopped before there was one"""
    saves: int
    """checkpoints made before the target, or in total if it was missed"""
    failures: int
    """losses of stages before the target, or in total if it was missed"""
    steps_lost: int
    """steps undone by all rollbacks"""
    stopped: str


class ArmInputs(Record):
    """Prices and sizes that determine an arm's hours and traffic, for recomputation.

    They are those of the clock's model and machines, except ``scale``.
    """

    _former = former_names(repeated_steps="again")
    replacement_s: float
    load_s: float
    repeated_steps: float
    """steps repeated after a loss"""
    bandwidth: float | None
    """bytes per second of a link, or None if infinite"""
    scale: float
    """bytes of a block stage over those in the raced model"""
    replicas: int
    stages: int
    microbatches: int
    microbatch_size: int
    context: int
    dim: int
    wire_bytes: float
    """mean bytes of a number sent from stage to stage, over both directions"""
    parameters: list[int]
    """parameters of each stage, the ends first"""


class ArmScore(Record):
    """One arm over all seeds, and its costs without failures."""

    _former = former_names(inputs="given", traffic_per_weight_byte="weights")
    name: str
    changes: dict[str, str]
    """the arm's changes of the recipe"""
    faults: bool
    """whether the failures apply"""
    routing: str
    runs: list[ArmRun]
    step_s: float
    """seconds of one step by the clock"""
    save_s: float
    step_bytes: float
    """bytes that copies add to a step in the clock's model, as the strategies state"""
    traffic: float
    """``step_bytes`` over the activations and gradients that all replicas send in a step"""
    memory: float
    """memory of copies over all stages' weights and moments"""
    curves: list[list[tuple[float, float]]]
    """curve of each seed: pairs of hours and smoothed loss"""
    traffic_per_weight_byte: float = 0.0
    """bytes that a replica sends to others in a step over those of its weights"""
    workers: int = 0
    """machines that train; 0 in results of older versions"""
    control: str = ""
    """name of the control that it is; empty if it is none"""
    exact: bool | None = None
    """whether all its strategies restore lost state exactly, or None in results of older versions"""
    computes_copies: bool = False
    """whether workers also compute stages whose copies they hold (``CopyCost.forward``)"""
    inputs: ArmInputs | None = None
    """inputs of its numbers, with :attr:`courses`"""
    courses: list[ArmCourse] = Field(default_factory=list)
    """course of each seed"""

    @model_validator(mode="before")
    @classmethod
    def _complete_older(cls, fields: Any) -> Any:
        """Derive ``computes_copies``, which older results lack, from the arm's settings."""
        if not isinstance(fields, dict) or "computes_copies" in fields:
            return fields
        changes = fields.get("changes", {})
        redundant = "redundant" in changes.get("recovery.strategy", "").replace(",", " ").split()
        return {**fields, "computes_copies": redundant and changes.get("recovery.options.forward") != "False"}

    def spread(self, measure: str) -> Spread | None:
        """Return the spread of a number over the seeds, or None if a seed lacks it."""
        return spread(getattr(run, measure) for run in self.runs)

    def interval(self, measure: str) -> tuple[float, float] | None:
        """Return the 95 % bootstrap interval of a number's mean, or None if a seed lacks it or there are few."""
        numbers = [getattr(run, measure) for run in self.runs]
        return None if len(numbers) < MIN_SEEDS or None in numbers else bootstrap(numbers)

    @property
    def other_changes(self) -> dict[str, str]:
        """Its changes besides recovery; arms with equal values differ in recovery only."""
        return {k: v for k, v in self.changes.items() if not k.startswith(("recovery.", "checkpoint."))}

    @property
    def missed(self) -> int:
        """Seeds that missed the target."""
        return sum(run.ticks is None for run in self.runs)


def add_reset_ratios(arms: Sequence[ArmScore]) -> list[ArmScore]:
    """Return the arms with the steps of each arm with failures relative to those of the matching reset control."""
    resets = [arm for arm in arms if arm.control == "reset"]
    compared = []
    for arm in arms:
        own = next((reset for reset in resets if reset.other_changes == arm.other_changes), None)
        if own is None or not arm.faults or arm.control:
            compared.append(arm)
            continue
        runs = [_with_reset_ratio(run, reset_run.ticks) for run, reset_run in zip(arm.runs, own.runs, strict=True)]
        compared.append(arm.model_copy(update={"runs": runs}))
    return compared


def _with_reset_ratio(run: ArmRun, ticks: float | None) -> ArmRun:
    ratio = run.ticks / ticks if run.ticks is not None and ticks else None
    return run.model_copy(update={"reset_ratio": ratio})


class SeedTrace(Record):
    """The trace of one seed: (step, stage) of every failure, and its digest."""

    seed: int
    digest: str
    faults: list[tuple[int, int]]
    replica: int = 0
    """replica of the arms that have it; all arms have replica 0"""


class ComparisonResults(Record):
    """All results of a comparison; its report and table derive from this alone."""

    _former = former_names(replica_failures="further", failure_domain="blows")
    version: int = 1
    name: str
    clock: str
    """the recipe that determines the hours"""
    steps: int
    stages: int
    target_at: float
    hourly: float
    failures: list[SeedTrace]
    replica_failures: list[SeedTrace] = Field(default_factory=list)
    """failures of replicas 1, 2, …, if an arm has several"""
    arms: list[ArmScore]
    search: list[ArmScore] = Field(default_factory=list)
    """optimizer settings tried without failures; the best is the arm 'tuned'"""
    failure_domain: str = "stage"
    """stages that one failure takes (``compare.trace.failure_domain``)"""

    @property
    def priced(self) -> bool:
        """Whether steps take time by the clock."""
        return bool(self.arms[0].step_s)

    @property
    def without_failures(self) -> bool:
        """Whether several arms race, none of them with failures."""
        return len(self.arms) > 1 and not (self.hourly and any(arm.faults for arm in self.arms))

    @property
    def contestants(self) -> list[ArmScore]:
        """Arms with failures, except controls; all such arms if none has failures."""
        return [arm for arm in self.arms if (arm.faults or self.without_failures) and not arm.control]

    @property
    def oracle(self) -> ArmScore | None:
        """The arm that lost only the time of replacements (oracle), if raced with the recipe's other settings."""
        return next((arm for arm in self.arms if arm.control == "oracle" and not arm.other_changes), None)

    def reset_cost(self, reset: ArmScore) -> Spread | None:
        """Return the steps of a control that loses moments alone over those of the matching fault-free arm.

        Return None if there is no such arm, or one of them missed the target.
        """
        matching = (arm for arm in self.arms if not arm.faults and arm.other_changes == reset.other_changes)
        fault_free = next(matching, None)
        pairs = zip(reset.runs, fault_free.runs, strict=True) if fault_free else ()
        return spread(_with_reset_ratio(run, fault_free_run.ticks).reset_ratio for run, fault_free_run in pairs)

    @property
    def machines_differ(self) -> bool:
        """Whether arms train on different numbers of machines."""
        return len({arm.workers for arm in self.arms}) > 1

    def ranked(self) -> list[ArmScore]:
        """Return the fault-free arm, then the others by mean hours to the target (steps if they take no time).

        Arms that missed the target come last.
        """
        return [self.arms[0], *sorted(self.arms[1:], key=lambda arm: (arm.missed, self._needed(arm)))]

    def _needed(self, arm: ArmScore) -> float:
        """Return an arm's mean hours to the target (steps if they take no time); 0 if it missed it."""
        numbers = arm.spread("hours" if self.priced else "ticks")
        return numbers.mean if numbers else 0.0

    @property
    def finishers(self) -> list[ArmScore]:
        """Contestants that reached the target with every seed, in the order of :meth:`ranked`."""
        return sorted((arm for arm in self.contestants if not arm.missed), key=self._needed)

    def winner(self) -> ArmScore | None:
        """Return the contestant that reached the target first, on average over seeds, or None if none reached it."""
        return next(iter(self.finishers), None)


def score(
    free: Mapping[int, ArmCourse],
    course: Mapping[int, ArmCourse],
    clocks: tuple[ArmClock, ArmClock],
    digests: Mapping[int, str],
    target_at: float,
    scale: float,
) -> list[ArmRun]:
    """Score an arm's runs against the fault-free arm's, whose clock is the first of ``clocks``."""
    runs = []
    for seed, reference_course in free.items():
        own = course[seed]
        target = loss_at(reference_course.points, target_at * reference_course.ticks)
        ticks, reference = ticks_to(own.points, target), ticks_to(reference_course.points, target)
        assert reference is not None, "the fault-free arm reaches its own loss"
        hours = None if ticks is None else clocks[1].seconds(own, ticks, scale) / 3600
        reference_hours = clocks[0].seconds(reference_course, reference, scale) / 3600
        until = own.ticks if ticks is None else ticks
        runs.append(
            ArmRun(
                seed=seed,
                trace=digests[seed],
                target=target,
                ticks=ticks,
                hours=hours,
                ratio=None if ticks is None else ticks / reference,
                hours_ratio=None if hours is None else hours / reference_hours if reference_hours else None,
                machine_hours=None if hours is None else hours * clocks[1].workers,
                final=next((loss for _, loss in reversed(smoothed_losses(own.points))), None),
                saves=sum(1 for tick in own.saved if tick <= until),
                failures=sum(1 for loss in own.loss_events if loss.tick < until),
                steps_lost=sum(loss.steps_lost for loss in own.loss_events),
                stopped=own.stopped,
            )
        )
    return runs


def curve(course: ArmCourse, clock: ArmClock, scale: float) -> list[tuple[float, float]]:
    """Return (hours, smoothed loss) of a course by a clock."""
    return [(clock.seconds(course, tick, scale) / 3600, loss) for tick, loss in smoothed_losses(course.points)]


MIN_FAILURES = 5
"""failures before the target, over all seeds, that each of two arms needs before they are ranked"""
Certainty = Literal["alone", "too few failures", "one seed", "every seed", "close"]


class RankedArm(NamedTuple):
    """An arm that reached the target with every seed, and what it needed: hours, or steps if they take no time."""

    arm: ArmScore
    needed: Spread


class Ranking(NamedTuple):
    """The contestants that reached the target with every seed, the first one first."""

    arms: list[RankedArm]
    unit: Literal["hours", "ticks"]
    certainty: Certainty
    """``every seed``: the first arm was ahead of the second with each seed; ``close``: only on average"""


def ranking(results: ComparisonResults) -> Ranking:
    """Rank by mean hours, or by mean steps if they take no time."""
    unit: Literal["hours", "ticks"] = "hours" if results.priced else "ticks"
    ranked = [RankedArm(arm, arm_spread) for arm in results.finishers if (arm_spread := arm.spread(unit)) is not None]
    least = 0 if results.without_failures else MIN_FAILURES
    return Ranking(ranked, unit, _certainty([entry.arm for entry in ranked], unit, least))


def failures(arm: ArmScore) -> int:
    """Return the failures of an arm before the target, over all seeds."""
    return sum(run.failures for run in arm.runs)


def _certainty(arms: list[ArmScore], unit: str, min_failures: int) -> Certainty:
    if len(arms) < 2:
        return "alone"
    first, second = arms[:2]
    if min(failures(first), failures(second)) < min_failures:
        return "too few failures"
    if len(first.runs) == 1:
        return "one seed"
    pairs = zip(first.runs, second.runs, strict=True)
    return "every seed" if all(getattr(own, unit) < getattr(theirs, unit) for own, theirs in pairs) else "close"
