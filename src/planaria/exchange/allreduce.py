"""All-reduce: in every step, replicas average their gradients before the update. They never differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from planaria.config import ExchangeConfig
from planaria.errors import UserError
from planaria.exchange import message
from planaria.exchange.aggregate import Aggregator, aggregator, equal, mean
from planaria.exchange.base import ExchangeCost, Offer, Outer, Parts, Shapes, Weights, meeting_cost
from planaria.exchange.pairing import one_group


@dataclass(frozen=True)
class AllReduce:
    """Bits of a number of the gradient in a message. The outer state holds nothing but the rounding's residual."""

    bits: int = 32
    aggregate: Aggregator = field(default=mean, kw_only=True)
    every = 0
    delay = 0
    prefetches = False
    synchronised = True

    @classmethod
    def from_config(cls, config: ExchangeConfig) -> AllReduce:
        if config.every:
            raise UserError(
                f"exchange.kind = 'allreduce' averages the gradients of every step, not of every {config.every}; leave "
                "exchange.every out, or take 'diloco'"
            )
        return cls(config.bits, aggregate=aggregator(config))

    @property
    def parts(self) -> Parts:
        return message.residual(self.bits)

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        return one_group(members)

    def start(self, weights: Weights) -> Outer:
        return Outer()

    def prefetched(self, outer: Outer) -> Tensor | None:
        return None

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        return message.rounded_offer(fast, outer["residual"], self.bits)

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        """g ← (1/n) Σ_j g_j, or what another aggregator makes of them."""
        said, residual = message.heard(offers, me, fast, self.bits)
        return message.fast_copy(self.aggregate(said, equal(said)), fast), outer.settled(residual=residual)

    def apart(self, offers: Mapping[int, Offer]) -> float:
        return message.apart(offers, self.bits)

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        return meeting_cost(one_group(range(members)), message.packed_bytes(shapes, self.bits))
