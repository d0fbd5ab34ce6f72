"""Rules that look at each coordinate by itself: median and trimmed mean (arXiv 1803.01498).

Both need the middle of the members' values. A network of comparisons finds it without sorting, as machine code where
numba is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from planaria.common.compiled import COMPILED, compiled
from planaria.exchange.robust.base import CoordinateRule
from planaria.exchange.robust.products import NotFinite

Numbers = NDArray[Any]
_TOGETHER = 512
"""coordinates of all members that are looked at together: they stay in the fastest memory"""


class Median(CoordinateRule):
    """med_j x_j[k]; of an even number the mean of the two in the middle."""

    def combine(self, rows: Sequence[Tensor]) -> Tensor:
        return middle(rows, (len(rows) - 1) // 2)


class TrimmedMean(CoordinateRule):
    """The mean of x_j[k] without the f largest and the f smallest."""

    def combine(self, rows: Sequence[Tensor]) -> Tensor:
        return middle(rows, self.liars)


def middle(rows: Sequence[Tensor], trim: int) -> Tensor:
    """Of each coordinate the mean of ``rows`` [d] without the ``trim`` largest and the ``trim`` smallest: [d].

    A new tensor. Rows go in whole into each comparison, so that it takes one instruction for several coordinates, and
    the order in which the rest is added up follows from the numbers alone. Which of two zeros of different signs is the
    smaller depends on the machine; the value is never −0, so that it does not.

    :raises NotFinite: when a number is not.
    """
    if COMPILED:
        return _by_machine(rows, trim)
    # A number that is infinite, or none, makes a sum with zeros that is none, while the rows are at hand.
    total = torch.zeros_like(rows[0])
    if not math.isfinite(sum(float(torch.dot(row, total)) for row in rows)):
        raise NotFinite("a number is not finite")
    held = list(rows)
    for low, high, smaller, larger in network(len(rows), trim):
        one, other = held[low], held[high]
        if smaller:
            held[low] = torch.minimum(one, other)
        if larger:
            held[high] = torch.maximum(one, other)
    for row in held[trim : len(held) - trim]:
        total.add_(row)
    return total.div_(len(rows) - 2 * trim)


def _by_machine(rows: Sequence[Tensor], trim: int) -> Tensor:
    """The same to the last bit."""
    held, value = [row.contiguous() for row in rows], torch.empty_like(rows[0])
    places = [row.data_ptr() for row in held]
    lowest, size = min(places), rows[0].element_size()
    starts = np.array([(place - lowest) // size for place in places])
    # One view from the first row in memory to the last: compiled code takes arrays, not lists of them.
    first = held[places.index(lowest)].numpy()
    memory = as_strided(first, (int(starts.max()) + len(first),), writeable=False)
    share = memory.dtype.type(len(rows) - 2 * trim)
    if not middles(memory, starts, _table(len(rows), trim), trim, share, value.numpy()):
        raise NotFinite("a number is not finite")
    return value


@compiled
def middles(memory: Numbers, starts: Numbers, network: Numbers, trim: int, share: Any, out: Numbers) -> bool:
    """``out`` [d] ← the mean of what the comparisons of a ``network`` [k, 4] leave in the middle of the vectors that
    begin at ``starts`` [n] of ``memory``; ``share``: how many these are, of their type. Were all numbers finite?

    Number by number what :func:`middle` does with torch, in the same order: the bits are the same, so that replicas
    with and without numba agree.
    """
    held = np.zeros((len(starts), _TOGETHER), memory.dtype)
    odd = False
    for begin in range(0, len(out), _TOGETHER):
        size = min(_TOGETHER, len(out) - begin)
        for member in range(len(starts)):
            row, first = held[member], starts[member] + begin
            source = memory[first : first + size]
            for k in range(size):
                row[k] = source[k]
                odd |= row[k] - row[k] != 0
        for place in range(len(network)):
            one, other = held[network[place, 0]], held[network[place, 1]]
            for k in range(_TOGETHER):  # always so many, and both results, which takes less than to ask what is needed
                low, high = one[k], other[k]
                one[k] = low if low < high else high
                other[k] = high if low < high else low
        target = out[begin : begin + size]
        target[:] = 0
        for member in range(trim, len(starts) - trim):
            row = held[member]
            for k in range(size):
                target[k] += row[k]
        for k in range(size):
            target[k] /= share
    return not odd


@lru_cache
def _table(count: int, trim: int) -> NDArray[np.int64]:
    """The :func:`network` as an array [k, 4]."""
    return np.array(network(count, trim), dtype=np.int64).reshape(-1, 4)


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
