"""What a routing is: which stages each microbatch of a step visits, and in which order."""

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
