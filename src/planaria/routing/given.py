"""Given routing: the recipe itself says which stages each microbatch visits, the same in every step."""

from __future__ import annotations

from planaria.config import RunConfig
from planaria.errors import UserError


def given(config: RunConfig, step: int) -> list[tuple[int, ...]]:
    """``routing.routes``; UserError when they are not one closed route for each microbatch over the recipe's stages."""
    pipeline, found = config.pipeline, config.routing.routes
    if len(found) != pipeline.microbatches:
        raise UserError(
            f"routing.routes: has {len(found)} routes; pipeline.microbatches = {pipeline.microbatches} needs one for "
            "each"
        )
    for i, route in enumerate(found):
        inner = route[1:-1]
        if len(route) < 3 or route[0] or route[-1] or not all(1 <= stage <= pipeline.stages for stage in inner):
            raise UserError(
                f"routing.routes: route {i} is {route}; it must lead from 0 over block stages 1..{pipeline.stages} to 0"
            )
        if len(set(inner)) < len(inner):
            raise UserError(f"routing.routes: route {i} is {route}; no stage may come twice")
    return [tuple(route) for route in found]
