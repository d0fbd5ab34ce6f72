"""No exchange: replicas that start alike and never hear of one another. The baseline that any exchange must beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from planaria.exchange.base import Exchange, ExchangeCost, Offer, Outer, Shapes, Weights


class Local(Exchange):
    """Rounds never come; driven through one, everybody is alone and nothing changes."""

    @property
    def interval(self) -> None:
        return None

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        return [(member,) for member in sorted(members)]

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        return Offer()

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        return dict(fast), outer.settled()

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        return ExchangeCost(0.0, 0.0)
