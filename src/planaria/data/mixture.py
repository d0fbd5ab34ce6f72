"""The source of each sample of a mixture, and its number within the source. Pure, and O(1) per sample."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planaria.config.bounds import MAX_MIXTURE_PERIOD
from planaria.config.schema import DataConfig

Quotas = tuple[int, ...]
"""samples of each source per block; (1,) for a single source"""


def quotas(data: DataConfig) -> Quotas:
    """Return how many samples of a block each source of ``data`` gets, in the order of ``data.sources``.

    The block is the smallest in which the shares are integers, by the weights as written (0.7 is seven tenths). If it
    would exceed ``MAX_MIXTURE_PERIOD`` samples, use the nearest shares in a block of that size, by largest remainder.
    """
    weights = [Fraction(repr(config.weight)) for _, config in sorted(data.mixture.items())] or [Fraction(1)]
    shares = [weight / sum(weights) for weight in weights]
    size = math.lcm(*(share.denominator for share in shares))
    if size <= MAX_MIXTURE_PERIOD:
        return tuple(int(share * size) for share in shares)
    counts = [int(share * MAX_MIXTURE_PERIOD) for share in shares]
    short = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * MAX_MIXTURE_PERIOD)
    for i in short[: MAX_MIXTURE_PERIOD - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


class SourceOrder:
    """The order of the sources, block after block.

    In every block each source has exactly its quota of samples. Its i-th comes at a random place in the i-th of as many
    equal parts of the block (stratified sampling). So among the first n samples a source of share w among K sources has
    n·w, within 1 + w·K. A strict rotation would have a period: a replica that takes every second block could miss a
    source permanently.
    """

    def __init__(self, counts: Quotas, seed: int) -> None:
        self._quotas = counts
        self._seed = seed
        self._size = sum(counts)

    def at(self, n: int) -> tuple[int, int]:
        """Return the source of sample ``n`` ≥ 0, and how many earlier samples are of the same source."""
        if len(self._quotas) == 1:
            return 0, n
        block, index = divmod(n, self._size)
        order = _source_order(self._quotas, self._seed, block)
        source = int(order[index])
        return source, block * self._quotas[source] + int(np.count_nonzero(order[:index] == source))

    def before(self, n: int) -> Sequence[int]:
        """Return how many of the first ``n`` samples are from each source."""
        if len(self._quotas) == 1:
            return [n]
        block, index = divmod(n, self._size)
        begun = np.bincount(_source_order(self._quotas, self._seed, block)[:index], minlength=len(self._quotas))
        return [block * quota + int(more) for quota, more in zip(self._quotas, begun, strict=True)]


@lru_cache(maxsize=8)
def _source_order(counts: Quotas, seed: int, block: int) -> npt.NDArray[np.intp]:
    """Return the source of each sample of a block."""
    drawn = hashlib.shake_256(f"{seed} mixture {block}".encode()).digest(8 * sum(counts))
    uniform = (np.frombuffer(drawn, "<u8") >> 11) * 2.0**-53
    sources = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(quota) for quota in counts])
    return sources[np.argsort((ranks + uniform) / np.array(counts)[sources], kind="stable")]
