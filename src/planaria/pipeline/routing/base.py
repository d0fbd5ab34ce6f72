"""The base of routings, and the fixed ones: which stages each microbatch of a step visits, and in which order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from planaria.common.errors import UserError
from planaria.config.registry import Choice
from planaria.config.schema import RunConfig

Route = tuple[int, ...]
"""a closed walk ``(0, …, 0)`` over stages"""


class Routing(Choice, ABC):
    """Base of all routings; its fields are its options. Pure: what it answers depends on its arguments alone."""

    varies: ClassVar[bool] = False
    """are routes drawn anew in every step, so that any two stages may meet?"""
    unfit: ClassVar[str] = ""
    """what it does to stages that were trained in their order, as a clause; empty: nothing to warn of"""

    @abstractmethod
    def routes(self, config: RunConfig, step: int) -> list[Route]:
        """One closed route over stages for each of the recipe's microbatches, in training step ``step``."""


def require(found: Sequence[Sequence[int]], config: RunConfig, place: str) -> list[Route]:
    """The routes, if microbatches can take them.

    :raises UserError: naming ``place``, and what is wrong with which route.
    """
    pipeline = config.pipeline
    if len(found) != pipeline.microbatches:
        raise UserError(
            f"{place}: has {len(found)} routes; pipeline.microbatches = {pipeline.microbatches} needs one for each"
        )
    for i, route in enumerate(found):
        inner = route[1:-1]
        if len(route) < 3 or route[0] or route[-1] or not all(1 <= stage <= pipeline.stages for stage in inner):
            raise UserError(
                f"{place}: route {i} is {route}; it must lead from 0 over block stages 1..{pipeline.stages} to 0"
            )
        if len(set(inner)) < len(inner):
            raise UserError(f"{place}: route {i} is {route}; no stage may come twice")
    return [tuple(route) for route in found]


class Full(Routing):
    """Every microbatch visits every stage in natural order."""

    def routes(self, config: RunConfig, step: int) -> list[Route]:
        return full(config.pipeline.stages, config.pipeline.microbatches)


def full(stages: int, microbatches: int) -> list[tuple[int, ...]]:
    """Routes ``0 → 1 → … → stages → 0`` for every microbatch; the same at every step."""
    return [(0, *range(1, stages + 1), 0)] * microbatches


class Given(Routing):
    """``routing.routes``."""

    def routes(self, config: RunConfig, step: int) -> list[Route]:
        """:raises UserError: when they are not one closed route for each microbatch over the recipe's stages."""
        return require(config.routing.routes, config, "routing.routes")


FEWEST = 4
"""block stages that two disjoint pairs take"""


class Swapped(Routing):
    """Half of the microbatches meet the outer stages in swapped order."""

    unfit: ClassVar[str] = "half of the microbatches meet the outer stages in an order that they do not know"

    def routes(self, config: RunConfig, step: int) -> list[Route]:
        return swapped(config.pipeline.stages, config.pipeline.microbatches)


def swapped(stages: int, microbatches: int) -> list[tuple[int, ...]]:
    """Even microbatches go 0 → 1 → 2 → … → S−1 → S → 0, odd ones 0 → 2 → 1 → 3 → … → S−2 → S → S−1 → 0.

    The first two and the last two block stages so learn each other's place. For training only: validation, generation
    and export take the natural order.

    :raises UserError: when there are fewer than four stages, so that the two pairs overlap.
    """
    if stages < FEWEST:
        raise UserError(
            f"routing.kind = 'swapped' needs {FEWEST} block stages or more, not {stages}; "
            "raise pipeline.stages, or use 'full'"
        )
    natural = (0, *range(1, stages + 1), 0)
    crossed = (0, 2, 1, *range(3, stages - 1), stages, stages - 1, 0)
    return [natural if i % 2 == 0 else crossed for i in range(microbatches)]
