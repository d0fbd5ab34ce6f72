"""Small stages for tests of exchanges, and inner phases that differ between replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from benchmarks.exchange_in_process import Replica, replicas
from torch import Tensor

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Exchange
from planaria.exchange.registry import EXCHANGES, make_exchange

SHAPES = {"layers.0.weight": torch.Size([5, 7]), "layers.1.weight": torch.Size([3, 50]), "norm.weight": torch.Size([])}
COUNT = sum(shape.numel() for shape in SHAPES.values())
GIVEN = {"gasloc": {"alpha": 0.5, "beta": 0.7, "gamma": 0.7}}
"""options without a default"""
KINDS = sorted(EXCHANGES.shipped)


def make(kind: str, **options: object) -> Exchange:
    """An exchange as a recipe would make it."""
    return make_exchange(ExchangeConfig(kind=kind, options=Options({**GIVEN.get(kind, {}), **options})))


def fitting(kind: str, **options: object) -> Exchange:
    """The same with those of the ``options`` that the kind has."""
    fields = EXCHANGES.declared([kind], options)
    return make(kind, **{name: value for name, value in fields.items() if kind in have(name)})


def have(option: str) -> list[str]:
    """The kinds that have this option."""
    exact = ["eager"] if option == "bits" else []  # it has the option, and refuses all values but 32
    return [kind for kind in KINDS if option in EXCHANGES.find(kind).model_fields and kind not in exact]


def weights(seed: int, std: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: std * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def drift(of: Mapping[int, Replica], seed: int, std: float = 0.1) -> None:
    """An inner phase that moves every replica at random."""
    for member, replica in of.items():
        moved = weights(1000 * seed + member, std)
        replica.fast = {name: tensor + moved[name] for name, tensor in replica.fast.items()}


def apart(made: Exchange, count: int, start: Callable[[int], dict[str, Tensor]] = weights) -> dict[int, Replica]:
    """Return replicas that have already diverged: each starts from its own weights."""
    of = replicas(made, weights(0), count)
    for member, replica in of.items():
        replica.fast = start(member)
        replica.outer = made.start(replica.fast)
    return of


def mean(of: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in of.values()]).mean(0) for name in SHAPES}


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Largest difference between two of the same names."""
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)
