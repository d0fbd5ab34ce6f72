"""Optimizers: a registry, each one file."""

from __future__ import annotations

from functools import lru_cache

from planaria.config.registry import Registry
from planaria.config.schema import OptimConfig
from planaria.models.optimizers.adamw import AdamW
from planaria.models.optimizers.base import Optimizer
from planaria.models.optimizers.muon import Muon
from planaria.models.optimizers.sgd import Sgd

OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer",
    "optim.kind",
    Optimizer,  # type: ignore[type-abstract]
    {"adamw": AdamW, "muon": Muon, "sgd": Sgd},
)


@lru_cache
def optimizer(config: OptimConfig) -> Optimizer:
    """Return the optimizer that the recipe names, made once.

    :raises UserError: naming the kind or option that is unknown, or the option's wrong value.
    """
    return OPTIMIZERS.make(config.kind, config.options)
