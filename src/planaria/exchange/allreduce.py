"""All-reduce of gradients, and the baseline without an exchange.

With all-reduce, replicas average their gradients in every step before the update and never differ. Without an exchange
they start from the same weights and receive nothing from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from planaria.exchange import weight_message
from planaria.exchange.aggregate import AggregatingExchange
from planaria.exchange.base import Exchange, ExchangeCost, Settled, Shapes, StageOuterState, Update, Updates, Weights


class AllReduce(AggregatingExchange):
    """Messages are gradients. Only feedback and robust rules need outer state."""

    synchronised: ClassVar[bool] = True
    receives_all: ClassVar[bool] = True

    @property
    def interval(self) -> int:
        return 0

    @property
    def bit_identical(self) -> bool:
        """False with a robust rule, since Byzantine members need not apply the result."""
        return self.tolerated == 0

    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        return self.compression.update(outer, fast)

    def settle(self, outer: StageOuterState, fast: Weights, updates: Updates, me: int) -> Settled:
        """g ← (1/n) Σ_j g_j, or the value of another aggregator, or the mean of estimates."""
        decoded, kept = self.compression.receive(outer, updates, me, fast)
        aggregate = self.aggregate_with_rule(outer, decoded)
        value, shared = self.compression.result(outer, aggregate)
        measured = self.compression.with_measurements(outer, decoded)
        return weight_message.fast_copy(value, fast), measured.settled(
            **kept, **shared, **self.parts_from_aggregate(aggregate)
        )


class NoExchange(Exchange):
    """Each replica trains alone, without rounds, and keeps its own weights."""

    @property
    def interval(self) -> None:
        return None

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        return [(member,) for member in sorted(members)]

    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        return Update()

    def settle(self, outer: StageOuterState, fast: Weights, updates: Updates, me: int) -> Settled:
        return dict(fast), outer.settled()

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        return ExchangeCost(0.0, 0.0)
