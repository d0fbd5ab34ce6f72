"""Coordinate-wise rules: median and trimmed mean (arXiv 1803.01498).

A network of comparisons finds the middle values without sorting; numba compiles it if installed.
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

from planaria.common.compiled import COMPILED, compile_function
from planaria.exchange.robust.base import CoordinateRule
from planaria.exchange.robust.products import NotFinite

Numbers = NDArray[Any]
_BLOCK = 512
"""coordinates processed together, so that all members' values stay in the first-level cache"""


class Median(CoordinateRule):
    """med_j x_j[k]; for an even number of members the mean of the two middle values."""

    def combine(self, rows: Sequence[Tensor]) -> Tensor:
        return trimmed_mean(rows, (len(rows) - 1) // 2)


class TrimmedMean(CoordinateRule):
    """The mean of x_j[k] without the f largest and the f smallest."""

    def combine(self, rows: Sequence[Tensor]) -> Tensor:
        return trimmed_mean(rows, self.byzantine)


def trimmed_mean(rows: Sequence[Tensor], trim: int) -> Tensor:
    """Return for each coordinate the mean of ``rows`` [d] without the ``trim`` largest and smallest: [d], a new tensor.

    Comparisons take whole rows, for vector instructions; the order of summation depends on the numbers only. The order
    of zeros of different signs depends on the machine, so the value is never −0.

    :raises NotFinite: if a number is not finite.
    """
    if COMPILED:
        return _compiled_trimmed_mean(rows, trim)
    # 0 · x is NaN for infinities and NaN, found while the rows are cached
    total = torch.zeros_like(rows[0])
    if not math.isfinite(sum(float(torch.dot(row, total)) for row in rows)):
        raise NotFinite("a number is not finite")
    sorted_rows = list(rows)
    for low, high, smaller, larger in sorting_network(len(rows), trim):
        lower, upper = sorted_rows[low], sorted_rows[high]
        if smaller:
            sorted_rows[low] = torch.minimum(lower, upper)
        if larger:
            sorted_rows[high] = torch.maximum(lower, upper)
    for row in sorted_rows[trim : len(sorted_rows) - trim]:
        total.add_(row)
    return total.div_(len(rows) - 2 * trim)


def _compiled_trimmed_mean(rows: Sequence[Tensor], trim: int) -> Tensor:
    """Return :func:`trimmed_mean` of ``rows``, bit for bit, with compiled code."""
    contiguous, means = [row.contiguous() for row in rows], torch.empty_like(rows[0])
    indices = [row.data_ptr() for row in contiguous]
    lowest, size = min(indices), rows[0].element_size()
    starts = np.array([(index - lowest) // size for index in indices])
    # one view over the memory of all rows, since compiled code takes arrays, not lists
    first = contiguous[indices.index(lowest)].numpy()
    memory = as_strided(first, (int(starts.max()) + len(first),), writeable=False)
    share = memory.dtype.type(len(rows) - 2 * trim)
    if not mean_of_middle(memory, starts, _network_table(len(rows), trim), trim, share, means.numpy()):
        raise NotFinite("a number is not finite")
    return means


@compile_function
def mean_of_middle(memory: Numbers, starts: Numbers, comparisons: Numbers, trim: int, share: Any, out: Numbers) -> bool:
    """Set ``out`` [d] to the means of the middle values of the vectors that start at ``starts`` [n] of ``memory``.

    Performs the operations of :func:`trimmed_mean` in the same order, so replicas with and without numba agree to the
    last bit.

    :param comparisons: of a :func:`sorting_network`, [k, 4].
    :param share: count of middle values, in their dtype.
    :return: whether all numbers are finite.
    """
    buffer = np.zeros((len(starts), _BLOCK), memory.dtype)
    invalid = False
    for begin in range(0, len(out), _BLOCK):
        size = min(_BLOCK, len(out) - begin)
        for member in range(len(starts)):
            row, first = buffer[member], starts[member] + begin
            source = memory[first : first + size]
            for k in range(size):
                row[k] = source[k]
                invalid |= row[k] - row[k] != 0
        for index in range(len(comparisons)):
            lower, upper = buffer[comparisons[index, 0]], buffer[comparisons[index, 1]]
            for k in range(_BLOCK):  # a fixed count and both results: cheaper than testing what is needed
                low, high = lower[k], upper[k]
                lower[k] = low if low < high else high
                upper[k] = high if low < high else low
        target = out[begin : begin + size]
        target[:] = 0
        for member in range(trim, len(starts) - trim):
            row = buffer[member]
            for k in range(size):
                target[k] += row[k]
        for k in range(size):
            target[k] /= share
    return not invalid


@lru_cache
def _network_table(count: int, trim: int) -> NDArray[np.int64]:
    """The :func:`sorting_network` as an array [k, 4]."""
    return np.array(sorting_network(count, trim), dtype=np.int64).reshape(-1, 4)


@lru_cache
def sorting_network(count: int, trim: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Return comparisons (i, j, smaller needed at i, larger needed at j) that move the ``trim`` smallest of ``count``
    numbers to the front and the ``trim`` largest to the end.

    Batcher's odd-even merge sort (AFIPS 1968) without the comparisons that only order numbers within these three parts.
    """
    kept: list[tuple[int, int, bool, bool]] = []
    ordered: set[int] = set()
    for low, high in reversed(_full_sort(count)):
        inside = [trim <= index < count - trim for index in (low, high)]
        if inside[0] == inside[1] and not {low, high} & ordered:
            continue
        kept.append((low, high, inside[0] or low in ordered, inside[1] or high in ordered))
        ordered |= {low, high}
    return tuple(reversed(kept))


def _full_sort(count: int) -> list[tuple[int, int]]:
    """Return the comparisons of a full sort, in order."""
    comparisons, width = [], 1
    while width < count:
        step = width
        while step:
            for start in range(step % width, count - step, 2 * step):
                for low in range(start, start + min(step, count - start - step)):
                    if low // (2 * width) == (low + step) // (2 * width):
                        comparisons.append((low, low + step))
            step //= 2
        width *= 2
    return comparisons
