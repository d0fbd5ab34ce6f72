"""Which way microbatches go: a registry of pure functions from a step's shape to its routes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from planaria.errors import UserError, nearest
from planaria.routing.full import full
from planaria.routing.swapped import swapped

Routing = Callable[[int, int, int], list[tuple[int, ...]]]
"""(stages, microbatches, step) → one closed route ``(0, …, 0)`` per microbatch."""

ROUTINGS: dict[str, Routing] = {"full": full, "swapped": swapped}


def routing(name: str) -> Routing:
    """The routing registered under ``name``; UserError names the nearest one."""
    if name not in ROUTINGS:
        raise UserError(f"pipeline.routing = {name!r}: no such routing; {nearest(name, ROUTINGS)}")
    return ROUTINGS[name]


def without(routes: Sequence[tuple[int, ...]], absent: Collection[int]) -> list[tuple[int, ...]]:
    """The routes past the ``absent`` stages: a residual stage that is left out hands its input on unchanged."""
    return [tuple(stage for stage in route if stage not in absent) for route in routes] if absent else list(routes)
