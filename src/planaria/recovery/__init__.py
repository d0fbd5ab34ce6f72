"""What becomes of a lost stage: a registry of recovery strategies, each one file, and chains of them."""

from __future__ import annotations

from collections.abc import Callable

from planaria.config import RecoveryConfig
from planaria.errors import UserError, nearest
from planaria.recovery.base import Recovery
from planaria.recovery.chain import Chain
from planaria.recovery.checkfree import CheckFree
from planaria.recovery.checkfree_plus import CheckFreePlus
from planaria.recovery.checkpoint import Checkpoint
from planaria.recovery.echo import Echo
from planaria.recovery.neighbour import CopyNeighbour
from planaria.recovery.redraw import Redraw
from planaria.recovery.redundant import Redundant

RECOVERIES: dict[str, Callable[[RecoveryConfig], Recovery]] = {
    "checkfree": CheckFree.from_config,
    "checkfree_plus": CheckFreePlus.from_config,
    "echo": Echo.from_config,
    "redundant": Redundant.from_config,
    "checkpoint": Checkpoint.from_config,
    "copy": CopyNeighbour.from_config,
    "uniform": CheckFree.uniform,
    "random": Redraw.random,
    "identity": Redraw.skipped,
}


def names(config: RecoveryConfig) -> list[str]:
    """The strategies that a recipe names, in the order in which they are tried."""
    return [name.strip() for name in config.strategy.split(",")]


def recovery(config: RecoveryConfig, stages: int) -> Chain:
    """The strategies that the recipe names, for ``stages`` block stages; UserError names the nearest known one."""
    chosen = {}
    for name in names(config):
        if name not in RECOVERIES:
            raise UserError(
                f"recovery.strategy = {config.strategy!r}: no strategy {name!r}; {nearest(name, RECOVERIES)}"
            )
        if name in chosen:
            raise UserError(f"recovery.strategy = {config.strategy!r}: {name!r} is there twice; remove one")
        chosen[name] = RECOVERIES[name](config)
    return Chain(chosen, stages)
