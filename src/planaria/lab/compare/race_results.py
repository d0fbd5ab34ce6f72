"""What a comparison found: every arm with every seed, on the way to the same loss. Pure arithmetic on courses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from pydantic import Field

from planaria.common.documents import Record
from planaria.lab.compare.clock import Clock
from planaria.lab.compare.race import Course, Point
from planaria.lab.compare.race_spec import SMOOTHED
from planaria.lab.trials.spread import Spread, bootstrap, spread

ENOUGH = 5
"""seeds from which on an interval of their mean is told: of fewer it says too little"""


def smoothed(points: Sequence[Point]) -> list[tuple[float, float]]:
    """(tick, loss): each validation as the mean of the last :data:`SMOOTHED` ones, as far as there are so many."""
    found = []
    for last in range(SMOOTHED, len(points) + 1):
        window = points[last - SMOOTHED : last]
        found.append((float(window[-1].tick), statistics.fmean(point.loss for point in window)))
    return found


def ticks_to(points: Sequence[Point], target: float) -> float | None:
    """Ticks until the smoothed loss first is at most ``target``, between validations on a straight line; or None."""
    before: tuple[float, float] | None = None
    for tick, loss in smoothed(points):
        if loss <= target:
            if before is None or before[1] <= loss:
                return tick
            return before[0] + (tick - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (tick, loss)
    return None


def loss_at(points: Sequence[Point], tick: float) -> float:
    """The smoothed loss at the last validation not after ``tick``.

    :raises ValueError: when there is none so early.
    """
    past = [loss for at, loss in smoothed(points) if at <= tick]
    if not past:
        raise ValueError(f"no smoothed validation by tick {tick:g}: validate more often, or run longer")
    return past[-1]


class Run(Record):
    """One arm with one seed."""

    seed: int
    trace: str
    """digest of the failures that struck it, its first replica if it has several"""
    target: float
    """the loss to reach, nats"""
    ticks: float | None
    """to the target; None if it was not reached"""
    hours: float | None
    """to the target, by the arm's clock"""
    ratio: float | None
    """ticks over the fault-free arm's with the same seed"""
    reset_ratio: float | None = None
    """ticks over those of the control that loses moments alone, with the same seed; None without it"""
    hours_ratio: float | None
    machine_hours: float | None = None
    """hours times the machines that train"""
    final: float | None
    """the last smoothed loss; None if the arm stopped before there was one"""
    saves: int
    """checkpoints that were made before the target, or in all where it was not reached"""
    failures: int
    """losses that were met before the target, or in all where it was not reached"""
    steps_lost: int
    """by rollbacks, in all"""
    stopped: str


class Given(Record):
    """Prices and sizes from which an arm's hours and traffic follow, for whoever computes them again.

    Of the model and machines that the clock is for, but for ``scale``.
    """

    replacement_s: float
    load_s: float
    again: float
    """steps made again after a loss"""
    bandwidth: float | None
    """bytes per second of a link; None: infinite"""
    scale: float
    """bytes of a block stage over those in the raced model"""
    replicas: int
    stages: int
    microbatches: int
    microbatch_size: int
    context: int
    dim: int
    wire_bytes: int
    """of a number that is sent from stage to stage"""
    parameters: list[int]
    """of each stage, the ends first"""


class Scored(Record):
    """One arm over all seeds, and what it costs while nothing fails."""

    name: str
    changes: dict[str, str]
    """what the arm changes of the recipe"""
    faults: bool
    """whether the failures struck it"""
    routing: str
    runs: list[Run]
    step_s: float
    """seconds of one step by the clock"""
    save_s: float
    step_bytes: float
    """bytes that copies add to a step, as the strategies state it, in the model that the clock is for"""
    traffic: float
    """these over the activations and gradients that a step sends, of all replicas alike"""
    memory: float
    """memory that copies take, over all stages' weights and moments"""
    curves: list[list[tuple[float, float]]]
    """for each seed, (hours, smoothed loss)"""
    weights: float = 0.0
    """bytes that a replica sends to others in a step, over those of its weights"""
    workers: int = 0
    """machines that train; 0 in results of versions that did not tell"""
    control: str = ""
    """the control that it is; empty if it is none"""
    exact: bool | None = None
    """does every strategy of it bring back what was lost? None in results of versions that did not tell"""
    given: Given | None = None
    """what its numbers were computed from, with :attr:`courses`"""
    courses: list[Course] = Field(default_factory=list)
    """for each seed"""

    def spread(self, of: str) -> Spread | None:
        """A number over the seeds; None if a seed lacks it."""
        return spread(getattr(run, of) for run in self.runs)

    def interval(self, of: str) -> tuple[float, float] | None:
        """The 95 % bootstrap interval of a number's mean over the seeds; None if a seed lacks it or they are few."""
        numbers = [getattr(run, of) for run in self.runs]
        return None if len(numbers) < ENOUGH or None in numbers else bootstrap(numbers)

    @property
    def alike(self) -> dict[str, str]:
        """What it changes beside its way of coping: arms with the same differ in nothing else."""
        return {k: v for k, v in self.changes.items() if not k.startswith(("recovery.", "checkpoint."))}

    @property
    def missed(self) -> int:
        """Seeds with which the target was not reached."""
        return sum(run.ticks is None for run in self.runs)


def against_reset(arms: Sequence[Scored]) -> list[Scored]:
    """The same, with each struck arm's steps over those of the reset control that differs in nothing else."""
    resets = [arm for arm in arms if arm.control == "reset"]
    found = []
    for arm in arms:
        mine = next((one for one in resets if one.alike == arm.alike), None)
        if mine is None or not arm.faults or arm.control:
            found.append(arm)
            continue
        runs = [_over(run, other.ticks) for run, other in zip(arm.runs, mine.runs, strict=True)]
        found.append(arm.model_copy(update={"runs": runs}))
    return found


def _over(run: Run, ticks: float | None) -> Run:
    ratio = run.ticks / ticks if run.ticks is not None and ticks else None
    return run.model_copy(update={"reset_ratio": ratio})


class Failures(Record):
    """The trace of one seed: (step, stage) of every failure, and its digest."""

    seed: int
    digest: str
    faults: list[tuple[int, int]]
    replica: int = 0
    """of each arm that has so many; all arms have replica 0"""


class Compared(Record):
    """Everything that a comparison found; its report and its table are drawn from this alone."""

    version: int = 1
    name: str
    clock: str
    """the recipe that the hours are for"""
    steps: int
    stages: int
    target_at: float
    hourly: float
    failures: list[Failures]
    further: list[Failures] = Field(default_factory=list)
    """what strikes further replicas, where an arm has several"""
    arms: list[Scored]
    search: list[Scored] = Field(default_factory=list)
    """settings of the optimizer that were tried without failures; the best is the arm 'tuned'"""
    blows: str = "stage"
    """what a failure took (``chaos.blows``)"""

    @property
    def priced(self) -> bool:
        """Do steps take time by the clock?"""
        return bool(self.arms[0].step_s)

    @property
    def contestants(self) -> list[Scored]:
        """Arms that failures struck, and that somebody could choose."""
        return [arm for arm in self.arms if arm.faults and not arm.control]

    @property
    def floor(self) -> Scored | None:
        """The arm that lost nothing but the time of replacements, if it was raced as the recipe is."""
        return next((arm for arm in self.arms if arm.control == "oracle" and not arm.alike), None)

    def alone(self, reset: Scored) -> Spread | None:
        """Of a control that loses moments alone: its steps over those of the arm that differs from it in losing none;
        None where there is no such arm, or one of them missed the target."""
        calm = next((arm for arm in self.arms if not arm.faults and arm.alike == reset.alike), None)
        pairs = zip(reset.runs, calm.runs, strict=True) if calm else ()
        return spread(_over(run, other.ticks).reset_ratio for run, other in pairs)

    @property
    def machines_differ(self) -> bool:
        """Do some arms train on more machines than others?"""
        return len({arm.workers for arm in self.arms}) > 1

    def ranked(self) -> list[Scored]:
        """The fault-free arm, then the others by their mean hours to the target (steps, where these take no time); last
        those that missed it."""
        of = "hours" if self.priced else "ticks"

        def rank(arm: Scored) -> tuple[int, float]:
            found = arm.spread(of)
            return (arm.missed, found[0] if found else 0.0)

        return [self.arms[0], *sorted(self.arms[1:], key=rank)]


def score(
    free: Mapping[int, Course],
    course: Mapping[int, Course],
    clocks: tuple[Clock, Clock],
    digests: Mapping[int, str],
    target_at: float,
    scale: float,
) -> list[Run]:
    """An arm's runs against the fault-free arm's, whose clock is the first of ``clocks``."""
    runs = []
    for seed, other in free.items():
        own = course[seed]
        target = loss_at(other.points, target_at * other.ticks)
        ticks, reference = ticks_to(own.points, target), ticks_to(other.points, target)
        assert reference is not None, "the fault-free arm reaches its own loss"
        hours = None if ticks is None else clocks[1].seconds(own, ticks, scale) / 3600
        fair = clocks[0].seconds(other, reference, scale) / 3600
        until = own.ticks if ticks is None else ticks
        runs.append(
            Run(
                seed=seed,
                trace=digests[seed],
                target=target,
                ticks=ticks,
                hours=hours,
                ratio=None if ticks is None else ticks / reference,
                hours_ratio=None if hours is None else hours / fair if fair else None,
                machine_hours=None if hours is None else hours * clocks[1].workers,
                final=next((loss for _, loss in reversed(smoothed(own.points))), None),
                saves=sum(1 for tick in own.saved if tick <= until),
                failures=sum(1 for met in own.met if met.tick < until),
                steps_lost=sum(met.steps_lost for met in own.met),
                stopped=own.stopped,
            )
        )
    return runs


def curve(course: Course, clock: Clock, scale: float) -> list[tuple[float, float]]:
    """(hours, smoothed loss) of a course by a clock."""
    return [(clock.seconds(course, tick, scale) / 3600, loss) for tick, loss in smoothed(course.points)]
