"""What ``benchmarks.field`` counts, from the lines that the processes of any system leave: pure arithmetic.

An update is told of by every process that took it, in a :class:`Line`. Lines become updates, in order of time; an
update that a later one of the same or a lower number replaces was undone, and what it learned is lost with it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

SMOOTHED = 10
"""updates whose losses are averaged before they are held against a target"""


@dataclass(frozen=True)
class Line:
    """One process took part in an update."""

    t: float
    """when it had taken it; monotonic seconds"""
    began: float
    """when it began to compute it"""
    step: int
    """the number of the update, from 0"""
    used: int
    """samples in the whole update, of all who took part"""
    upto: int
    """samples of the stream that are behind the run with this update, used or passed over"""
    loss: float | None
    """mean over this process's own samples, in nats; None where it had no part in them"""


@dataclass(frozen=True)
class Update:
    """One update of the model."""

    t: float
    """when the last process had taken it"""
    began: float
    """when the first process began"""
    step: int
    used: int
    upto: int
    loss: float
    """nan where nobody came to tell it"""
    by: int = 1
    """processes that told of it: one that dies may not have come to that"""


def updates_of(lines: Iterable[Line]) -> list[Update]:
    """The updates that lines tell of, in order of time.

    Processes that take the same update have all begun before the first of them is done, as it needs the gradients of
    all. So a line of the same number that began later tells of the update made again.
    """
    open_: dict[int, list[Line]] = {}
    groups: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: line.t):
        group = open_.get(line.step)
        if group is None or line.began > group[0].t:
            group = open_[line.step] = []
            groups.append(group)
        group.append(line)
    return sorted(map(_update, groups), key=lambda update: update.t)


def _update(group: Sequence[Line]) -> Update:
    losses = [line.loss for line in group if line.loss is not None]
    return Update(
        t=max(line.t for line in group),
        began=min(line.began for line in group),
        step=group[0].step,
        used=max(line.used for line in group),
        upto=max(line.upto for line in group),
        loss=fmean(losses) if losses else float("nan"),
        by=len(group),
    )


def standing(updates: Iterable[Update]) -> tuple[list[Update], list[Update]]:
    """The updates that are in the model at the end, and those that were undone."""
    stand: list[Update] = []
    undone: list[Update] = []
    for update in updates:
        while stand and stand[-1].step >= update.step:
            undone.append(stand.pop())
        stand.append(update)
    return stand, undone


def lost(stand: Sequence[Update]) -> int:
    """Samples that were passed over: behind the run, and in no update; negative where some are in two."""
    return stand[-1].upto - sum(update.used for update in stand) if stand else 0


def rate(updates: Iterable[Update], begin: float, end: float, batch: int) -> float:
    """Useful updates a second between two moments: samples in updates that stand, over those of a whole batch.

    An update that was undone after the end counts as well; what is undone before it does not.
    """
    before, _ = standing(update for update in updates if update.t <= end)
    return sum(update.used for update in before if update.t > begin) / batch / (end - begin)


def next_steps(updates: Sequence[Update], kills: Sequence[float]) -> list[float]:
    """Seconds from each kill to the first new update that began after it; infinite where there is none.

    New is an update that the model had not made before, so that what is only made again does not count. One that was
    under way is not the next one: it may have needed nothing more of the process that died.
    """
    found = []
    for kill in kills:
        reached = max((update.step for update in updates if update.t <= kill), default=-1)
        found.append(next((u.t for u in updates if u.began > kill and u.step > reached), math.inf) - kill)
    return found


def to_target(updates: Sequence[Update], begin: float, target: float) -> tuple[int, float] | None:
    """Updates carried out, undone ones among them, and seconds since ``begin``, until the loss is at the target.

    The loss is the mean of the last :data:`SMOOTHED` updates that stand; None when it is never there.
    """
    for count in range(SMOOTHED, len(updates) + 1):
        if (loss := smoothed(updates[:count])) is not None and loss <= target:
            return count, updates[count - 1].t - begin
    return None


def smoothed(updates: Sequence[Update]) -> float | None:
    """Mean loss of the last updates that stand."""
    losses = [update.loss for update in standing(updates)[0] if math.isfinite(update.loss)]
    return fmean(losses[-SMOOTHED:]) if len(losses) >= SMOOTHED else None


def loss_at(updates: Iterable[Update], step: int) -> float | None:
    """The same as it was when update ``step`` was made; None when the run had not come so far."""
    stand, _ = standing(updates)
    steps = [update.step for update in stand]
    return smoothed(stand[: bisect_right(steps, step)]) if steps and steps[-1] >= step else None


def apart(one: Iterable[Update], other: Iterable[Update]) -> float:
    """Largest difference of losses, in nats, of updates of the same number that stand in both runs.

    Only of those that as many processes told of in both: else the means are of other samples.
    """
    runs = ([u for u in standing(run)[0] if math.isfinite(u.loss)] for run in (one, other))
    first, second = ({(u.step, u.by): u.loss for u in run} for run in runs)
    return max((abs(first[key] - second[key]) for key in first.keys() & second.keys()), default=0.0)


@dataclass(frozen=True)
class Strike:
    """A process is to be killed."""

    at: float
    """seconds after the first update"""
    share: float
    """which: the process at this share of all places, from 0 to 1 (exclusive)"""

    def place(self, places: int) -> int:
        return int(self.share * places)


def strikes(seed: int, kills: int, every: float) -> list[Strike]:
    """One in each interval of ``every`` seconds, at a random time of its middle half; the same for all systems."""
    drawn = random.Random(f"field {seed}")
    return [Strike((number + drawn.uniform(0.25, 0.75)) * every, drawn.random()) for number in range(kills)]
