"""The classes from outside planaria that a recipe chooses: what they do may change without the recipe."""

from __future__ import annotations

from planaria.config import RunConfig
from planaria.exchange import EXCHANGES
from planaria.model.families import FAMILIES
from planaria.recovery import RECOVERIES, names
from planaria.registry import Choice, foreign
from planaria.routing import ROUTINGS


def own_classes(config: RunConfig) -> list[type[Choice]]:
    """Those classes, and what of their bases is not planaria's either, in a fixed order."""
    strategies: list[type[Choice]] = [RECOVERIES.find(name) for name in names(config.recovery)]
    routing, exchange = ROUTINGS.find(config.routing.kind), EXCHANGES.find(config.exchange.kind)
    return foreign([*strategies, routing, exchange, FAMILIES.find(config.model.family)])
