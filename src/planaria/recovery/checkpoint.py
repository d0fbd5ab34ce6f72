"""Checkpointing: whatever is lost, all stages go back to the last durable state. How often to make one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import ClassVar, Literal, NamedTuple

from planaria.model.state import StageState
from planaria.recovery.base import Answer, Copy, Recovery, Replica, Workshop


class Checkpoint(Recovery):
    """Whole-model rollback: every loss is within its reach, and costs the steps since the last checkpoint."""

    exact: ClassVar[bool] = True

    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        return Answer(rollback="disk")

    def give(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        raise LookupError("checkpoints come from disk")

    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        raise LookupError("checkpoints come from disk")


def best_steps(hourly: float, stages: int, step_s: float, save_s: float) -> int:
    """Steps between checkpoints that lose the least, at least 1.

    ``hourly`` is the probability that one of ``stages`` independent stages fails within an hour; ``step_s`` and
    ``save_s`` are the seconds of a step and of a save.
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
    useful: int, every: int, struck: Collection[int], counted: Literal["steps", "ticks"] = "steps"
) -> Rollback:
    """Carry out ticks until ``useful`` steps are committed; before each tick in ``struck`` something is lost.

    Then all go back to the last save; the tick itself is carried out, from there. A save follows every ``every``
    committed steps, as in planaria's runs, or, ``counted`` in 'ticks', every ``every`` steps that were carried out
    (CheckFree, arXiv 2506.15461). The difference is what failures do to the next save: by steps each puts it off.
    Initial weights are durable. :func:`rollback_mean` is what to expect.

    :raises ValueError: when ``every`` is not positive.
    """
    if every < 1:
        raise ValueError(f"saves are a positive number of steps apart: {every}")
    step = durable = ticks = saves = rollbacks = 0
    while step < useful:
        if ticks and ticks in struck:
            step, rollbacks = durable, rollbacks + 1
        step, ticks = step + 1, ticks + 1
        if (step if counted == "steps" else ticks) % every == 0:
            durable, saves = step, saves + 1
    return Rollback(ticks, saves, rollbacks)


def rollback_mean(every: int, p: float, counted: Literal["steps", "ticks"] = "steps") -> float:
    """Mean ticks for each useful step of a long :func:`rollback`, when every tick is struck with probability ``p``.

    With q = 1 − p and f = ``every``, from one save to the next: f ticks keep what follows their last failure,
    1 + q + … + q^(f−1) = (1 − q^f) / p steps on average; f steps take one tick, and then f − 1 in a row that are not
    struck, which are reached after (q^−(f−1) − 1) / p ticks on average.
    """
    if p == 0.0:
        return 1.0
    q = 1.0 - p
    if counted == "ticks":
        return every * p / (1.0 - q**every)
    return (1.0 + (q ** (1 - every) - 1.0) / p) / every
