"""The optimizers, one file each."""

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
def make_optimizer(config: OptimConfig) -> Optimizer:
    """Return the optimizer that the recipe names, cached.

    :raises UserError: for an unknown kind or option, or an invalid option value.
    """
    return OPTIMIZERS.make(config.kind, config.options)
