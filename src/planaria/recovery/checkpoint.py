"""Checkpointing: whatever is lost, all stages go back to the last durable state. How often to make one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from planaria.config import RecoveryConfig
from planaria.model.state import StageState
from planaria.recovery.base import Answer, Replica, Workshop
from planaria.recovery.keepless import Keepless


class Checkpoint(Keepless):
    """Whole-model rollback: every loss is within its reach, and costs the steps since the last checkpoint."""

    @classmethod
    def from_config(cls, config: RecoveryConfig) -> Checkpoint:
        return cls()

    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        return Answer(rollback=True)

    def give(self, lost: int, own: StageState, kept: StageState | None) -> StageState:
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
