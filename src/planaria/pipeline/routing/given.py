"""Given routing: the recipe itself says which stages each microbatch visits, the same in every step."""

from __future__ import annotations

from planaria.config.schema import RunConfig
from planaria.pipeline.routing.base import Route, Routing, require


class Given(Routing):
    """``routing.routes``."""

    def routes(self, config: RunConfig, step: int) -> list[Route]:
        """:raises UserError: when they are not one closed route for each microbatch over the recipe's stages."""
        return require(config.routing.routes, config, "routing.routes")
