"""Checkpointing: whatever is lost, all stages go back to the last durable state. How often to make one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import ClassVar, Literal, NamedTuple

from planaria.models.state import StageState
from planaria.recovery.base import Answer, Copy, Recovery, Replica, Workshop

MOST = 700.0
"""e to a higher power is more than a float holds"""


class Checkpoint(Recovery):
    """Whole-model rollback: every loss is within its reach, and costs the steps since the last checkpoint."""

    exact: ClassVar[bool] = True

    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        return Answer(rollback="disk")

    def give(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        raise LookupError("checkpoints come from disk")

    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        raise LookupError("checkpoints come from disk")


def best_steps(hourly: float, stages: float, step_s: float, save_s: float) -> int:
    """Steps between checkpoints that lose the least, at least 1.

    ``hourly`` is the probability that one of ``stages`` independent stages, or blows that take several, fails within an
    hour; ``step_s`` and ``save_s`` are the seconds of a step and of a save.
    """
    rate = -stages * math.log1p(-hourly) / 3600.0
    if rate == 0.0:
        raise ValueError("without failures no checkpoint is best")
    return max(1, round(best_interval(save_s, 1.0 / rate) / step_s))


def best_interval(save_s: float, mean_time_to_failure_s: float) -> float:
    """Seconds of training between checkpoints that lose least (Daly 2006, doi 10.1016/j.future.2004.11.016, eq. 37).

    A refinement of Young's √(2 δ M): with δ = ``save_s`` the cost of one checkpoint and M the mean time between
    failures, both in seconds, τ = √(2 δ M) · (1 + ⅓ √(δ/2M) + ⅑ (δ/2M)) − δ for δ < 2M, and τ = M otherwise.

    :raises ValueError: when a time is negative or M is zero.
    """
    if save_s < 0 or mean_time_to_failure_s <= 0:
        raise ValueError(f"times must be positive: {save_s}, {mean_time_to_failure_s}")
    ratio = save_s / (2.0 * mean_time_to_failure_s)
    if ratio >= 1.0:
        return mean_time_to_failure_s
    young = math.sqrt(2.0 * save_s * mean_time_to_failure_s)
    return young * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_s


class Rollback(NamedTuple):
    """What a number of useful steps takes under whole-model rollback."""

    ticks: int
    """steps that are carried out, those that are lost again among them"""
    saves: int
    rollbacks: int


def rollback(
    useful: int, every: int, struck: Collection[int], counted: Literal["steps", "ticks"] = "steps", behind: int = 0
) -> Rollback:
    """Carry out ticks until ``useful`` steps are committed; before each tick in ``struck`` something is lost.

    Then all go back to the last save; the tick itself is carried out, from there. A save follows every ``every``
    committed steps, as in planaria's runs, or, ``counted`` in 'ticks', every ``every`` steps that were carried out
    (CheckFree, arXiv 2506.15461). The difference is what failures do to the next save: by steps each puts it off.
    Initial weights are durable. Saves in the background are so ``behind`` ticks later, unless something is lost before;
    the next one waits until then. :func:`rollback_mean` is what to expect.

    :raises ValueError: when ``every`` is not positive, or saves in the background are counted in ticks.
    """
    if every < 1:
        raise ValueError(f"saves are a positive number of steps apart: {every}")
    if behind and counted == "ticks":
        raise ValueError("saves in the background are counted in steps")
    step = ticks = saves = rollbacks = 0
    durable, writing = 0, Behind(behind)
    while step < useful:
        if ticks and ticks in struck:
            step, rollbacks = durable, rollbacks + 1
            writing.give_up()
        step, ticks = step + 1, ticks + 1
        durable = writing.finished(ticks, durable)
        if ticks % every == 0 if counted == "ticks" else writing.due(step, every, durable):
            saves += 1
            durable = writing.begin(ticks, step, durable)
    return Rollback(ticks, saves, rollbacks)


class Behind:
    """The one save that is under way, which can be rolled back to so many ``ticks`` after it was begun; 0: at once."""

    def __init__(self, ticks: int) -> None:
        self._ticks, self._under_way = ticks, (-1, -1)

    def due(self, step: int, every: int, durable: int) -> bool:
        """Is the step's state to be saved, when that of the step ``durable`` is?"""
        return self._under_way[0] < 0 and step // every > durable // every

    def begin(self, tick: int, step: int, durable: int) -> int:
        """Save the state of ``step``; the newest that is durable then."""
        self._under_way = tick + self._ticks, step
        return self.finished(tick, durable)

    def finished(self, tick: int, durable: int) -> int:
        """The newest step that is durable after ``tick`` ticks, where until now ``durable`` was."""
        at, step = self._under_way
        if at < 0 or tick < at:
            return durable
        self.give_up()
        return step

    def give_up(self) -> None:
        """Something is lost: nothing comes of the save under way."""
        self._under_way = (-1, -1)


def rollback_mean(every: int, p: float, counted: Literal["steps", "ticks"] = "steps", behind: int = 0) -> float:
    """Mean ticks for each useful step of a long :func:`rollback`, when every tick is struck with probability ``p``.

    With q = 1 − p and f = ``every``, from one save to the next: f ticks keep what follows their last failure,
    1 + q + … + q^(f−1) = (1 − q^f) / p steps on average; f steps take one tick, and then f − 1 in a row that are not
    struck, which are reached after (q^−(f−1) − 1) / p ticks on average.

    Saves that are d = ``behind`` ticks late, d ≤ f: from one that is durable to the next, f ticks, or those until one
    is struck, (1 − q^f) / p on average; if so, with 1 − q^f, all go back and need f + d steps, one and then f + d − 1
    in a row. Together (1 − q^f) · q^(1−f−d) / p ticks for f steps; the above for d = 0. Infinite where that is more
    than a float holds.

    :raises ValueError: when saves are later than the next, or are counted in ticks.
    """
    if behind > every or (behind and counted == "ticks"):
        raise ValueError(f"saves {behind} ticks late must not be later than the next, {every} {counted} on")
    if p == 0.0:
        return 1.0
    q = 1.0 - p
    if counted == "ticks":
        return every * p / (1.0 - q**every)
    exponent = (1 - every - behind) * math.log(q) if q > 0.0 else math.inf
    return (1.0 - q**every) * math.exp(exponent) / (p * every) if exponent < MOST else math.inf
