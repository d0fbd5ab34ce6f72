"""All-reduce: in every step, replicas average their gradients before the update. They never differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from planaria.exchange import message
from planaria.exchange.aggregate import Averaging
from planaria.exchange.base import Offer, Outer, Weights


class AllReduce(Averaging):
    """Messages are gradients. The outer state holds nothing but what feedback or a robust rule needs."""

    synchronised: ClassVar[bool] = True
    follows: ClassVar[bool] = True

    @property
    def interval(self) -> int:
        return 0

    @property
    def equal(self) -> bool:
        """Not beside a robust rule: that is for members that lie, and need not go on with what they were told."""
        return self.borne == 0

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        return self.compression.offer(outer, fast)

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        """g ← (1/n) Σ_j g_j, or what another aggregator makes of them, or the mean of estimates."""
        said, kept = self.compression.heard(outer, offers, me, fast)
        joined = self.joined(outer, said)
        reached, shared = self.compression.reached(outer, joined)
        known = self.compression.learned(outer, said)
        return message.fast_copy(reached, fast), known.settled(**kept, **shared, **self.remembered(joined))
