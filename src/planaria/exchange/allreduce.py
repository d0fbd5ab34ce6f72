"""All-reduce: in every step, replicas average their gradients before the update. They never differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from planaria.exchange import message
from planaria.exchange.aggregate import Averaging
from planaria.exchange.base import Offer, Outer, Weights


class AllReduce(Averaging):
    """Messages are gradients. The outer state holds nothing but the rounding's residual."""

    synchronised: ClassVar[bool] = True

    @property
    def interval(self) -> int:
        return 0

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        return message.rounded_offer(fast, outer["residual"], self.bits)

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        """g ← (1/n) Σ_j g_j, or what another aggregator makes of them."""
        said, residual = message.heard(offers, me, fast, self.bits)
        return message.fast_copy(self.aggregate(said), fast), outer.settled(residual=residual)
