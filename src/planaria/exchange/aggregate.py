"""How what the members of a group say becomes one value: the rules, and exchanges that go by one."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import AfterValidator, PrivateAttr
from torch import Tensor

from planaria.common.errors import UserError, nearest
from planaria.exchange import message
from planaria.exchange.base import (
    Counted,
    Exchange,
    ExchangeCost,
    Offers,
    Outer,
    Parts,
    Shapes,
    Told,
    Weights,
    meeting_cost,
)
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compression import Compression, compression_of
from planaria.exchange.robust import Robust
from planaria.exchange.weighing import Weighing


class Aggregator(Protocol):
    """A pure function: all who have the same arguments, in the same order, get the same value to the last bit."""

    def __call__(self, values: Mapping[int, Weights], weights: Mapping[int, float]) -> dict[str, Tensor]:
        """One value of at least one, with new tensors.

        ``values``: member → tensors by name, of the same names and shapes at all members, in order of member.
        ``weights``: member → how much it counts; positive, and only their ratios matter.
        """
        ...


def mean(values: Mapping[int, Weights], weights: Mapping[int, float]) -> dict[str, Tensor]:
    """Σ w_j x_j / Σ w_j, elementwise, added up in the order in which members are given."""
    first, *others = values
    total = {name: tensor * weights[first] for name, tensor in values[first].items()}
    for member in others:
        for name, tensor in total.items():
            tensor.add_(values[member][name], alpha=weights[member])
    return {name: tensor.div_(sum(weights[member] for member in values)) for name, tensor in total.items()}


AGGREGATORS: dict[str, Aggregator] = {"mean": mean}


CENTRE = "centre"
"""the part of an outer state that is the last value of a robust rule which continues from it"""


def _known(name: str) -> str:
    if name not in AGGREGATORS:
        raise ValueError(f"no such aggregator; {nearest(name, AGGREGATORS)}")
    return name


class Averaging(Exchange, ABC):
    """An exchange whose members say one value each, in so many bits, and go by an aggregate of them."""

    follows: ClassVar[bool] = False
    """Does every member hear every message of every other, so that they can follow estimates of each other?"""

    bits: Literal[4, 8, 16, 32] = 32
    """bits of a number in a message that others wait for; what rounding takes is sent later"""
    aggregator: Annotated[str, AfterValidator(_known)] = "mean"
    """how what the members of a group say becomes one value: mean"""

    _compressed: Compression | None = PrivateAttr(default=None)
    _robust: Robust | None = PrivateAttr(default=None)

    @cached_property
    def compression(self) -> Compression:
        """How messages that others wait for travel."""
        return self._compressed or compression_of(f"{self.bits}bits")

    def compressed(self, by: Compression) -> Self:
        """The same, with the messages that others wait for made shorter.

        :raises UserError: when it cannot work like that.
        """
        if self.bits != 32:
            raise UserError(f"exchange.compress beside exchange.options.bits = {self.bits}: give one of them")
        if by.feedback.estimates and not self.follows:
            raise UserError(
                "exchange.compress: this feedback has estimates of every member, and here some may be missing in a "
                "round; take ef14, or exchange.kind = 'allreduce'"
            )
        made = self.model_copy()
        made._compressed = by
        return made

    def speaking(self, me: int) -> Self:
        if self._compressed is None:
            return self
        made = self.model_copy()
        made._compressed = replace(self._compressed, me=me)
        made.__dict__.pop("compression", None)  # cached, without the member
        return made

    def defended(self, by: Robust, members: int) -> Self:
        """The same, with a robust rule in place of the mean, for so many ``members``.

        :raises UserError: when it cannot work like that.
        """
        if wrong := self.undefended(by, members):
            raise UserError(f"exchange.robust: {wrong}")
        if self.compression.feedback.estimates:
            raise UserError(
                "exchange.robust beside estimates (exchange.compress): a difference to an estimate says nothing by "
                "itself; take ef14"
            )
        made = self.model_copy()
        made._robust = by
        return made

    def undefended(self, by: Robust, members: int) -> str:
        """Why it cannot go by this rule; empty if it can."""
        if by.continues and not self.synchronised:
            return (
                "such a rule goes on from a value that is equal at all members, and here each has its own; take another"
            )
        if by.scope == "replica" and not self.interval:
            return (
                "scope = 'replica' is for rounds, and here each stage agrees on its gradient within every step; leave "
                "scope out, or take exchange.kind = 'diloco'"
            )
        if by.scope == "replica" and type(self).spoken is Averaging.spoken:
            return "scope = 'replica': this kind does not say what its offers stand for (spoken); leave scope out"
        return ""

    def misfit(self, members: int) -> str:
        by = self._robust
        if by is None or members >= by.least():
            return "" if by is None else self.undefended(by, members)
        return f"{members} replicas are too few for {by.rule.liars} liars: {by.least()} or more"

    @property
    def borne(self) -> int:
        return 0 if self._robust is None else self._robust.rule.liars

    @property
    def strikes(self) -> int:
        return 0 if self._robust is None else self._robust.strikes

    def facing(self, refused: int, told: Told, counted: Counted | None = None) -> Self:
        if self._robust is None:
            return self
        made = self.model_copy()
        made._robust = self._robust.facing(refused, told, counted)
        return made

    @property
    def weighing(self) -> Weighing | None:
        if self._robust is None or self._robust.scope == "stage":
            return None
        return Weighing(self._robust, not self.synchronised, CENTRE, self.spoken)

    def spoken(self, outer: Outer, offers: Offers) -> dict[int, dict[str, Tensor]]:
        """What sound ``offers`` of the round after ``outer`` stand for: member → the value that a rule is to see."""
        raise NotImplementedError

    @property
    def parts(self) -> Parts:
        continues = self._robust is not None and self._robust.continues
        return {**self.compression.parts, **({CENTRE: "shared"} if continues else {})}

    def codec(self, outer: Outer) -> Compressor:
        return self.compression.codec(outer)

    def anew(self, outer: Outer) -> Outer:
        return self.compression.anew(outer)

    def joined(self, outer: Outer, said: Mapping[int, Weights]) -> dict[str, Tensor]:
        """What the round after ``outer`` makes of what members say: by a robust rule, or their aggregate.

        :raises TooManyLiars: when the rule does not bear it.
        """
        if self._robust is None:
            return self.aggregate(said)
        like = next(iter(said.values()))
        last = {name: tensor for name, tensor in outer[CENTRE].items() if name in like}
        return self._robust.aggregate(said, outer.rounds, last)

    def remembered(self, joined: Weights) -> dict[str, Weights]:
        """The parts of the outer state that follow from what a round came to; shares memory."""
        return {CENTRE: joined} if CENTRE in self.parts else {}

    def aggregate(self, said: Mapping[int, Weights]) -> dict[str, Tensor]:
        """One value of those of several members (member → tensors by name), all of which count the same."""
        return AGGREGATORS[self.aggregator](said, equal(said))

    def apart(self, outer: Outer, offers: Offers) -> float:
        return message.apart(offers, self.codec(outer), outer.rounds)

    def decoded(self, outer: Outer, offers: Offers, like: Weights) -> dict[int, dict[str, Tensor]]:
        """What the blocking parts of sound ``offers`` of the round after ``outer`` stand for, by member."""
        codec = self.codec(outer)
        return {member: message.unpack(offer.blocking, like, codec, outer.rounds) for member, offer in offers.items()}

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        return meeting_cost(self.groups(0, range(members), 0), self.compression.bytes(shapes))


def equal(members: Iterable[int]) -> dict[int, float]:
    """Weights by which each of ``members`` counts as much as any other."""
    return dict.fromkeys(members, 1.0)
