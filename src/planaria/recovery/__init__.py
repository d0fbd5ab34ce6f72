"""What becomes of a lost stage: a registry of recovery strategies, each one file."""

from __future__ import annotations

from collections.abc import Callable

from planaria.config import RecoveryConfig
from planaria.errors import UserError, nearest
from planaria.recovery.base import Recovery
from planaria.recovery.checkfree import CheckFree

RECOVERIES: dict[str, Callable[[RecoveryConfig], Recovery]] = {"checkfree": CheckFree.from_config}


def recovery(config: RecoveryConfig) -> Recovery:
    """The strategy that the recipe names; UserError names the nearest one."""
    if config.strategy not in RECOVERIES:
        mend = nearest(config.strategy, RECOVERIES)
        raise UserError(f"recovery.strategy = {config.strategy!r}: no such strategy; {mend}")
    return RECOVERIES[config.strategy](config)
