"""No exchange: replicas that start alike and never hear of one another. The baseline that any exchange must beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from planaria.config import ExchangeConfig
from planaria.exchange.base import ExchangeCost, Offer, Outer, Parts, Shapes, Weights


@dataclass(frozen=True)
class Local:
    """Rounds never come; driven through one, everybody is alone and nothing changes."""

    every = None
    delay = 0
    prefetches = False
    synchronised = False

    @classmethod
    def from_config(cls, config: ExchangeConfig) -> Local:
        return cls()

    @property
    def parts(self) -> Parts:
        return {}

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        return [(member,) for member in sorted(members)]

    def start(self, weights: Weights) -> Outer:
        return Outer()

    def prefetched(self, outer: Outer) -> Tensor | None:
        return None

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        return Offer()

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        return dict(fast), outer.settled()

    def apart(self, offers: Mapping[int, Offer]) -> float:
        return 0.0

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        return ExchangeCost(0.0, 0.0)
