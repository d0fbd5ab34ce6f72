"""As many points of a curve as a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

MOST = 4000
"""points; a screen is half as many pixels wide"""

Point = TypeVar("Point", bound=tuple[float, float | None])


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """All (x, y) points if there are at most so many; else of each stretch the lowest, the highest and the last.

    So no spike is lost, and no gap: of a stretch with points that have no y, one of these is kept.
    """
    if len(points) <= most:
        return list(points)
    stretch = -(-4 * len(points) // most)
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        own = range(start, min(start + stretch, len(points)))
        known = [(y, place) for place in own if (y := points[place][1]) is not None]
        gaps = [place for place in own if points[place][1] is None]
        places = {own[-1], *gaps[:1], *([min(known)[1], max(known)[1]] if known else [])}
        kept += [points[place] for place in sorted(places)]
    return kept
