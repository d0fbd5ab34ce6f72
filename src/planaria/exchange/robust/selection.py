"""The mean of what lies in the middle, coordinate by coordinate, without sorting: by a network of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def middle(rows: Sequence[Tensor], trim: int) -> Tensor:
    """Of each coordinate the mean of ``rows`` [d] without the ``trim`` largest and the ``trim`` smallest: [d].

    A new tensor. Rows go in whole into each comparison, so that it takes one instruction for several coordinates, and
    the order in which the rest is added up follows from the numbers alone.
    """
    held = list(rows)
    for low, high, smaller, larger in network(len(rows), trim):
        one, other = held[low], held[high]
        if smaller:
            held[low] = torch.minimum(one, other)
        if larger:
            held[high] = torch.maximum(one, other)
    first, *others = held[trim : len(held) - trim]
    total = first.clone() if not others else first + others[0]
    for row in others[1:]:
        total.add_(row)
    return total.div_(len(others) + 1) if others else total


@lru_cache
def network(count: int, trim: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Comparisons (i, j, is the smaller needed at i, is the larger needed at j), after which the ``trim`` smallest of
    ``count`` numbers stand first and the ``trim`` largest last.

    Batcher's odd-even merge sort (AFIPS 1968), of which only what bears upon that is kept: who is whose neighbour among
    those in the middle, or among those left out, does not matter.
    """
    kept: list[tuple[int, int, bool, bool]] = []
    ordered: set[int] = set()
    for low, high in reversed(_batcher(count)):
        inside = [trim <= place < count - trim for place in (low, high)]
        if inside[0] == inside[1] and not {low, high} & ordered:
            continue
        kept.append((low, high, inside[0] or low in ordered, inside[1] or high in ordered))
        ordered |= {low, high}
    return tuple(reversed(kept))


def _batcher(count: int) -> list[tuple[int, int]]:
    """The comparisons of a full sort, in order."""
    found, width = [], 1
    while width < count:
        step = width
        while step:
            for start in range(step % width, count - step, 2 * step):
                for low in range(start, start + min(step, count - start - step)):
                    if low // (2 * width) == (low + step) // (2 * width):
                        found.append((low, low + step))
            step //= 2
        width *= 2
    return found
