"""Full routing: every microbatch visits every stage in natural order."""

from __future__ import annotations

from planaria.config.schema import RunConfig
from planaria.pipeline.routing.base import Route, Routing


class Full(Routing):
    """Every microbatch visits every stage in natural order."""

    def routes(self, config: RunConfig, step: int) -> list[Route]:
        return full(config.pipeline.stages, config.pipeline.microbatches)


def full(stages: int, microbatches: int) -> list[tuple[int, ...]]:
    """Routes ``0 → 1 → … → stages → 0`` for every microbatch; the same at every step."""
    return [(0, *range(1, stages + 1), 0)] * microbatches
