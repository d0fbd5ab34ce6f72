"""How what the members of a group say becomes one value: a registry of rules, one of which the recipe names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from planaria.config import ExchangeConfig
from planaria.errors import UserError, nearest
from planaria.exchange.base import Weights


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


def aggregator(config: ExchangeConfig) -> Aggregator:
    """The rule that the recipe names; UserError names the nearest known one."""
    name = config.aggregator
    if name not in AGGREGATORS:
        raise UserError(f"exchange.aggregator = {name!r}: no such aggregator; {nearest(name, AGGREGATORS)}")
    return AGGREGATORS[name]


def equal(members: Iterable[int]) -> dict[int, float]:
    """Weights by which each of ``members`` counts as much as any other."""
    return dict.fromkeys(members, 1.0)
