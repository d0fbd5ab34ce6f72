"""Which way microbatches go: a registry of pure functions from a recipe and a step to the step's routes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from planaria.config import RunConfig
from planaria.errors import UserError, nearest
from planaria.routing.full import full
from planaria.routing.given import given
from planaria.routing.skipping import skipping
from planaria.routing.swapped import swapped

__all__ = ["ROUTINGS", "change", "full", "routes", "without"]

Routing = Callable[[RunConfig, int], list[tuple[int, ...]]]
"""(recipe, step) → one closed route ``(0, …, 0)`` over stages per microbatch."""

ROUTINGS: dict[str, Routing] = {
    "full": lambda config, step: full(config.pipeline.stages, config.pipeline.microbatches),
    "swapped": lambda config, step: swapped(config.pipeline.stages, config.pipeline.microbatches),
    "skipping": skipping,
    "given": given,
}


def routes(config: RunConfig, step: int) -> list[tuple[int, ...]]:
    """The routes of a training step; UserError names the nearest kind of routing where there is none such."""
    kind = config.routing.kind
    if kind not in ROUTINGS:
        raise UserError(f"routing.kind = {kind!r}: no such routing; {nearest(kind, ROUTINGS)}")
    return ROUTINGS[kind](config, step)


def change(config: RunConfig) -> bool:
    """Are routes drawn anew in every step, so that any two stages may meet?"""
    return config.routing.kind == "skipping"


def without(routes: Sequence[tuple[int, ...]], absent: Collection[int]) -> list[tuple[int, ...]]:
    """The routes past the ``absent`` stages: a residual stage that is left out hands its input on unchanged."""
    return [tuple(stage for stage in route if stage not in absent) for route in routes] if absent else list(routes)
