"""Results of repairs: the model before, and after each strategy."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from pydantic import Field

from planaria.common.documents import Record, former_names
from planaria.swarm.records.hit_tally import HitTally

BACK, MIX, TUNE, MASK = "back", "mix", "tune", "mask"
RANDOM, LAYERS, TUNE_PARENT = "random", "layers", "anew"
TITLES = {
    BACK: "go back to the parent",
    MIX: "interpolate, best α",
    TUNE: "fine-tune",
    MASK: "mask",
    RANDOM: "random mask, as dense",
    LAYERS: "mix layers by cosine",
    TUNE_PARENT: "fine-tune the parent",
}


class TextMeasurements(Record):
    """Measurements on held-out texts."""

    success: dict[str, HitTally] = Field(default_factory=dict)
    """attack, or "rejected" (pairs whose rejected text is likelier) → its rate"""
    accuracy: HitTally = HitTally()
    sound: HitTally = HitTally()
    """right answers with every reasoning step true"""
    nats: float | None = None
    """loss on benign texts, nats per token"""

    @property
    def worst(self) -> float | None:
        """The largest success, or None if none was measured."""
        return max((rate for tally in self.success.values() if (rate := tally.rate) is not None), default=None)

    def repaired(self, limit: float) -> bool | None:
        """Return whether every success is at most ``limit``, or None if none was measured."""
        return None if self.worst is None else self.worst <= limit

    def __add__(self, other: TextMeasurements) -> TextMeasurements:
        success = {kind: tally + other.success[kind] for kind, tally in self.success.items() if kind in other.success}
        return TextMeasurements(
            success=success, accuracy=self.accuracy + other.accuracy, sound=self.sound + other.sound
        )


class StrategyResult(Record):
    """One repair strategy and its result."""

    _former = former_names(detail="told")
    by: str
    detail: str = ""
    """selected parameters, in a few words"""
    after: TextMeasurements

    @property
    def title(self) -> str:
        return TITLES[self.by]


class Repaired(Record):
    """One model and all strategies applied to it."""

    _former = former_names(strategies="ways")
    arm: str = ""
    seed: int = 0
    peer: str = ""
    limit: float
    """largest success of a repaired model"""
    trusted: int
    own: int
    """trusted texts written by the poisoned model itself"""
    benign: int
    before: TextMeasurements
    strategies: list[StrategyResult]

    def best(self) -> StrategyResult | None:
        """Of the strategies that repaired it, return the one with the most right answers, or None if there is none."""
        repaired = [strategy for strategy in self.strategies if strategy.after.repaired(self.limit)]
        return max(repaired, key=lambda strategy: strategy.after.accuracy.rate or 0.0, default=None)


def pool_seeds(items: Sequence[TextMeasurements]) -> TextMeasurements:
    """Add all seeds' draws, for the intervals."""
    return functools.reduce(operator.add, items)
