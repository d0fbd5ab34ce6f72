"""Swapped routing (CheckFree+, arXiv 2506.15461): half of the microbatches meet the outer stages in swapped order."""

from __future__ import annotations

from typing import ClassVar

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.pipeline.routing.base import Route, Routing

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
