"""The loop in which median and trimmed mean spend their time, as machine code. Imported where numba is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.common.compiled import compiled

Numbers = NDArray[Any]
_TOGETHER = 512
"""coordinates of all members that are looked at together: they stay in the fastest memory"""


@compiled
def middles(memory: Numbers, starts: Numbers, network: Numbers, trim: int, share: Any, out: Numbers) -> bool:
    """``out`` [d] ← the mean of what the comparisons of a ``network`` [k, 4] leave in the middle of the vectors that
    begin at ``starts`` [n] of ``memory``; ``share``: how many these are, of their type. Were all numbers finite?

    Number by number what ``selection.py`` does with torch, in the same order: the bits are the same, so that replicas
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
