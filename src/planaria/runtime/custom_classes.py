"""Classes from outside planaria that a recipe names; a result depends on their code too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from planaria.config.registry import Choice, custom_choices
from planaria.config.schema import RunConfig
from planaria.exchange.registry import chosen_classes
from planaria.models.families import FAMILIES
from planaria.models.optimizers import OPTIMIZERS
from planaria.pipeline.codecs import codec_class
from planaria.pipeline.routing import ROUTINGS
from planaria.recovery import RECOVERIES, strategy_names
from planaria.recovery.codes import CODES


def custom_classes(config: RunConfig) -> list[type[Choice]]:
    """Return these classes and their bases from outside planaria, in a fixed order.

    :raises UserError: if one of them cannot be imported, or must not be.
    """
    chosen: list[type[Choice]] = [RECOVERIES.find(name) for name in strategy_names(config.recovery)]
    chosen += [CODES.find(name) for name in _codes(config.recovery.options)]
    chosen += [ROUTINGS.find(config.routing.kind), FAMILIES.find(config.model.family)]
    chosen += [OPTIMIZERS.find(config.optim.kind), codec_class(config.pipeline.wire)]
    return custom_choices([*chosen, *chosen_classes(config.exchange)])


def _codes(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the erasure codes named ``module:Class``, including those in a strategy's table."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _codes(value)
        elif key == "code" and isinstance(value, str) and ":" in value:
            yield value
