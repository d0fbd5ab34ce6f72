"""Checkpoint recovery, which rolls all stages back to the last durable state, and the best checkpoint interval."""

from __future__ import annotations

import math
from typing import ClassVar

from planaria.recovery.base import DamagedReplica, Recovery, StrategyPlan


class Checkpoint(Recovery):
    """Roll back the whole model: any loss is covered and costs the steps since the last checkpoint."""

    exact: ClassVar[bool] = True

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        return StrategyPlan(rollback="disk")


def best_steps(hourly: float, stages: float, step_s: float, save_s: float) -> int:
    """Return the number of steps between checkpoints that loses the least time, at least 1.

    ``hourly`` is the probability that one of ``stages`` independent stages (or groups that fail together) fails within
    an hour; ``step_s`` and ``save_s`` are seconds per step and per save.
    """
    rate = -stages * math.log1p(-hourly) / 3600.0
    if rate == 0.0:
        raise ValueError("without failures no checkpoint is best")
    return max(1, round(best_interval(save_s, 1.0 / rate) / step_s))


def best_interval(save_s: float, mean_time_to_failure_s: float) -> float:
    """Return the checkpoint interval in seconds that loses the least time (Daly 2006, doi 10.1016/j.future.2004.11.016,
    eq. 37).

    It refines Young's √(2 δ M). With δ = ``save_s`` the cost of a checkpoint and M the mean time between failures, both
    in seconds, τ = √(2 δ M) · (1 + ⅓ √(δ/2M) + ⅑ (δ/2M)) − δ for δ < 2M, and τ = M otherwise.

    :raises ValueError: if ``save_s`` is negative or M is not positive.
    """
    if save_s < 0 or mean_time_to_failure_s <= 0:
        raise ValueError(f"times must be positive: {save_s}, {mean_time_to_failure_s}")
    ratio = save_s / (2.0 * mean_time_to_failure_s)
    if ratio >= 1.0:
        return mean_time_to_failure_s
    young = math.sqrt(2.0 * save_s * mean_time_to_failure_s)
    return young * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_s
