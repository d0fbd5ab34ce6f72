"""How what the members of a group say becomes one value: the rules, and exchanges that go by one."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator
from torch import Tensor

from planaria.errors import nearest
from planaria.exchange import message
from planaria.exchange.base import Exchange, ExchangeCost, Offer, Parts, Shapes, Weights, meeting_cost


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


def _known(name: str) -> str:
    if name not in AGGREGATORS:
        raise ValueError(f"no such aggregator; {nearest(name, AGGREGATORS)}")
    return name


class Averaging(Exchange, ABC):
    """An exchange whose members say one value each, in so many bits, and go by an aggregate of them."""

    bits: Literal[4, 8, 16, 32] = 32
    """bits of a number in a message that others wait for; what rounding takes is sent later"""
    aggregator: Annotated[str, AfterValidator(_known)] = "mean"
    """how what the members of a group say becomes one value: mean"""

    @property
    def parts(self) -> Parts:
        return message.residual(self.bits)

    @property
    def blocking_bits(self) -> int:
        return self.bits

    def aggregate(self, said: Mapping[int, Weights]) -> dict[str, Tensor]:
        """One value of those of several members (member → tensors by name), all of which count the same."""
        return AGGREGATORS[self.aggregator](said, equal(said))

    def apart(self, offers: Mapping[int, Offer]) -> float:
        return message.apart(offers, self.bits)

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        return meeting_cost(self.groups(0, range(members), 0), message.packed_bytes(shapes, self.bits))


def equal(members: Iterable[int]) -> dict[int, float]:
    """Weights by which each of ``members`` counts as much as any other."""
    return dict.fromkeys(members, 1.0)
