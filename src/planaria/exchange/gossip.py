"""What exchanges in small random groups have in common: who meets, the message in one part or in two, and its bytes.

A replica says one tensor x, made of its slow weights φ and its drift θ − φ, and goes on with the mean of its group's.
So one tensor each is enough; the released code of arXiv 2506.10911 sends two.

In two parts (``prefetch``, or fewer than 32 bits): φ is known once the round before is settled and so is the next
group, so it can travel, in full, while the inner steps run. Only the drift is waited for. It is small beside φ and
bears rounding. That is more bytes in all, and fewer on the critical path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from planaria.exchange import message
from planaria.exchange.aggregate import Aggregator, equal, mean
from planaria.exchange.base import ExchangeCost, Offer, Outer, Parts, Shapes, Weights, meeting_cost
from planaria.exchange.pairing import random_groups


@dataclass(frozen=True)
class Gossip(ABC):
    """Inner steps between rounds, members of a group, bits of a number of the blocking part, one part or two."""

    every: int = 50
    group: int = 2
    bits: int = 32
    prefetch: bool = False
    aggregate: Aggregator = field(default=mean, kw_only=True)
    delay = 0
    synchronised = False

    @abstractmethod
    def says(self, drift: Tensor, slow: Tensor) -> Tensor:
        """x, from θ − φ and φ of one parameter."""

    @abstractmethod
    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """New slow weights and momentum, from the replica's own x and its group's mean."""

    @property
    def prefetches(self) -> bool:
        return self.two_parts

    @property
    def unit(self) -> float:
        """How many weights x is worth: its factor of φ."""
        return 1.0

    @property
    def two_parts(self) -> bool:
        return self.prefetch or self.bits < 32

    @property
    def parts(self) -> Parts:
        return {"slow": "shared", "momentum": "shared", **message.residual(self.bits)}

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        return random_groups(round, members, self.group, seed)

    def start(self, weights: Weights) -> Outer:
        return Outer({"slow": message.slow_copy(weights), "momentum": message.zeros(weights)})

    def prefetched(self, outer: Outer) -> Tensor | None:
        return message.pack(outer["slow"]) if self.two_parts else None

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        drift = {name: fast[name].detach().float() - slow for name, slow in outer["slow"].items()}
        if self.two_parts:
            prefetched = self.prefetched(outer) if prefetched is None else prefetched
            return message.rounded_offer(drift, outer["residual"], self.bits, prefetched)
        return Offer(message.pack({name: self.says(drift[name], slow) for name, slow in outer["slow"].items()}))

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        said, residual = message.heard(offers, me, outer["slow"], self.bits)
        if self.two_parts:
            prefetched = {member: message.unpack(offers[member].prefetched, outer["slow"]) for member in said}
            said = {
                member: {name: self.says(drift[name], prefetched[member][name]) for name in drift}
                for member, drift in said.items()
            }
        joined = self.aggregate(said, equal(said))
        new_slow, momentum = {}, {}
        for name, slow in outer["slow"].items():
            new_slow[name], momentum[name] = self.step(slow, outer["momentum"][name], said[me][name], joined[name])
        return message.fast_copy(new_slow, fast), outer.settled(slow=new_slow, momentum=momentum, residual=residual)

    def apart(self, offers: Mapping[int, Offer]) -> float:
        return message.apart(offers, self.bits) / (1.0 if self.two_parts else self.unit)

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        prefetched = message.packed_bytes(shapes) if self.two_parts else 0
        return meeting_cost(self.groups(0, range(members), 0), message.packed_bytes(shapes, self.bits), prefetched)
