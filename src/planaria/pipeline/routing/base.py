"""The base of routings, and fixed ones: the stages that each microbatch of a step visits, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from planaria.common.errors import UserError
from planaria.config.registry import Choice
from planaria.config.schema import RunConfig

StageRoute = tuple[int, ...]
"""a closed walk ``(0, …, 0)`` over stages"""


class Routing(Choice, ABC):
    """Base class of routings; its fields are its options. Routes depend on the arguments alone."""

    varies: ClassVar[bool] = False
    """whether routes are drawn again in every step, so that any two stages may meet"""
    exchanges_stages: ClassVar[bool] = False
    """whether stages take each other's place in some routes, so that block stages must be alike"""
    visits_all_stages: ClassVar[bool] = False
    """whether every microbatch visits every stage, as one array of weights requires (``model.share_over``)"""
    pretrained_warning: ClassVar[str] = ""
    """its effect on stages trained in natural order, as a clause of a warning; empty: no warning"""

    @abstractmethod
    def routes(self, config: RunConfig, step: int) -> list[StageRoute]:
        """Return one closed route over stages per microbatch of the recipe, in training step ``step``."""


def require(routes: Sequence[Sequence[int]], config: RunConfig, location: str) -> list[StageRoute]:
    """Return the routes, checked.

    :raises UserError: naming ``location``, the first invalid route and the reason.
    """
    pipeline = config.pipeline
    if len(routes) != pipeline.microbatches:
        raise UserError(
            f"{location} has {len(routes)} routes; pipeline.microbatches = {pipeline.microbatches} needs one for each"
        )
    for i, route in enumerate(routes):
        inner = route[1:-1]
        if len(route) < 3 or route[0] or route[-1] or not all(1 <= stage <= pipeline.stages for stage in inner):
            raise UserError(
                f"{location}: route {i} is {route}; it must lead from 0 over block stages 1..{pipeline.stages} to 0"
            )
        if len(set(inner)) < len(inner):
            raise UserError(f"{location}: route {i} is {route}; no stage may come twice")
    return [tuple(route) for route in routes]


class FullRouting(Routing):
    """Every microbatch visits every stage in natural order."""

    visits_all_stages: ClassVar[bool] = True

    def routes(self, config: RunConfig, step: int) -> list[StageRoute]:
        return full_routes(config.pipeline.stages, config.pipeline.microbatches)


def full_routes(stages: int, microbatches: int) -> list[tuple[int, ...]]:
    """Return routes ``0 → 1 → … → stages → 0`` for all microbatches, the same at every step."""
    return [(0, *range(1, stages + 1), 0)] * microbatches


class FixedRoutes(Routing):
    """``routing.routes``."""

    def routes(self, config: RunConfig, step: int) -> list[StageRoute]:
        """:raises UserError: unless there is one closed route per microbatch over the recipe's stages."""
        return require(config.routing.routes, config, "routing.routes")


MIN_SWAPPED_STAGES = 4
"""block stages that two disjoint pairs take"""


class SwappedRouting(Routing):
    """Half of the microbatches visit the outer stages in swapped order."""

    exchanges_stages: ClassVar[bool] = True
    visits_all_stages: ClassVar[bool] = True
    pretrained_warning: ClassVar[str] = "half of the microbatches visit the outer stages in an unfamiliar order"

    def routes(self, config: RunConfig, step: int) -> list[StageRoute]:
        return swapped_routes(config.pipeline.stages, config.pipeline.microbatches)


def swapped_routes(stages: int, microbatches: int) -> list[tuple[int, ...]]:
    """Return the routes 0 → 1 → 2 → … → S−1 → S → 0 of even and 0 → 2 → 1 → 3 → … → S−2 → S → S−1 → 0 of odd
    microbatches.

    So the first two and the last two block stages learn each other's position. Only training uses these routes:
    validation, generation and export use natural order.

    :raises UserError: for fewer than four stages, because the two pairs overlap.
    """
    if stages < MIN_SWAPPED_STAGES:
        raise UserError(
            f"routing.kind = 'swapped' needs {MIN_SWAPPED_STAGES} block stages or more, not {stages}; "
            "raise pipeline.stages, or use 'full'"
        )
    natural = (0, *range(1, stages + 1), 0)
    crossed = (0, 2, 1, *range(3, stages - 1), stages, stages - 1, 0)
    return [natural if i % 2 == 0 else crossed for i in range(microbatches)]
