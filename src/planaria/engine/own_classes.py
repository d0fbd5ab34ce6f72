"""The classes from outside planaria that a recipe chooses: what they do may change without the recipe."""

from __future__ import annotations

from planaria.config import RunConfig
from planaria.model.families import FAMILIES
from planaria.recovery import RECOVERIES, names
from planaria.registry import Choice, foreign
from planaria.routing import ROUTINGS


def own_classes(config: RunConfig) -> list[type[Choice]]:
    """Those classes, and what of their bases is not planaria's either, in a fixed order."""
    chosen: list[type[Choice]] = [RECOVERIES.find(name) for name in names(config.recovery)]
    return foreign([*chosen, ROUTINGS.find(config.routing.kind), FAMILIES.find(config.model.family)])
