"""Routing: a registry of pure functions from a recipe and a step to the step's routes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planaria.config.registry import Registry
from planaria.config.schema import RunConfig
from planaria.pipeline.routing.base import (
    FixedRoutes,
    FullRouting,
    Routing,
    StageRoute,
    SwappedRouting,
    require,
)
from planaria.pipeline.routing.skipping import Skipping

ROUTINGS: Registry[Routing] = Registry(
    "routing",
    "routing.kind",
    Routing,  # type: ignore[type-abstract]
    {"full": FullRouting, "swapped": SwappedRouting, "skipping": Skipping, "given": FixedRoutes},
)


def routes(config: RunConfig, step: int) -> list[StageRoute]:
    """Return the routes of a training step.

    :raises UserError: for an unknown kind or option, or an invalid route.
    """
    kind, chosen = config.routing.kind, make_routing(config).routes(config, step)
    return chosen if kind in ROUTINGS.shipped else require(chosen, config, f"routing.kind = {kind!r}")


def routes_vary(config: RunConfig) -> bool:
    """Whether routes are drawn again in every step, so that any two stages may meet."""
    return make_routing(config).varies


def make_routing(config: RunConfig) -> Routing:
    """Return the routing that a recipe names; UserError for an unknown kind or option."""
    return ROUTINGS.make(config.routing.kind, config.routing.options)


def skip_stages(complete: Sequence[tuple[int, ...]], absent: Collection[int]) -> list[tuple[int, ...]]:
    """Return the routes without the ``absent`` stages, which a residual stream skips."""
    return [tuple(stage for stage in route if stage not in absent) for route in complete] if absent else list(complete)
