"""Recovery of lost stages: a registry of strategies, and chains of them."""

from __future__ import annotations

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.registry import Registry
from planaria.config.schema import RecoveryConfig
from planaria.recovery.ablations import CopyNeighbour, IdentityStage, Oracle, Redraw, Reset
from planaria.recovery.base import Recovery
from planaria.recovery.chain import Chain
from planaria.recovery.checkfree import CheckFree, NeighbourMean
from planaria.recovery.checkfree_plus import CheckFreePlus
from planaria.recovery.checkpoint import Checkpoint
from planaria.recovery.echo import Echo
from planaria.recovery.redundant import Redundant
from planaria.recovery.snapshot import Snapshot
from planaria.recovery.survivor import Survivor
from planaria.recovery.whole_copies import WholeCopies

RECOVERIES: Registry[Recovery] = Registry(
    "recovery",
    "recovery.strategy",
    Recovery,  # type: ignore[type-abstract]
    {
        "checkfree": CheckFree,
        "checkfree_plus": CheckFreePlus,
        "echo": Echo,
        "redundant": Redundant,
        "snapshot": Snapshot,
        "whole_copies": WholeCopies,
        "survivor": Survivor,
        "checkpoint": Checkpoint,
        "copy": CopyNeighbour,
        "uniform": NeighbourMean,
        "random": Redraw,
        "identity": IdentityStage,
        "oracle": Oracle,
        "reset": Reset,
    },
    for_comparison=("copy", "uniform", "random", "identity", "oracle", "reset"),
)


def strategy_names(config: RecoveryConfig) -> list[str]:
    """Return the strategies that a recipe names, in the order in which they are tried."""
    return [name.strip() for name in config.strategy.split(",")]


def make_chain(config: RecoveryConfig, stages: int) -> Chain:
    """Return the chain of strategies that a recipe names, for ``stages`` block stages.

    :raises UserError: for an unknown strategy or option, or an invalid option value.
    """
    chosen = strategy_names(config)
    if twice := next((name for name in chosen if chosen.count(name) > 1), None):
        raise UserError(f"recovery.strategy = {config.strategy!r}: {twice!r} is listed twice; remove one")
    return Chain(RECOVERIES.make_all(chosen, config.options), stages)


def with_strategy(config: RecoveryConfig, strategy: str) -> RecoveryConfig:
    """Return ``config`` with another strategy, without options that the strategy does not declare."""
    changed = config.model_copy(update={"strategy": strategy})
    options = Options(RECOVERIES.declared(strategy_names(changed), config.options))
    return changed.model_copy(update={"options": options})
