"""Whose turn it is at sample ``n`` of a mixture, and how many turns that source has had. Pure, and O(1) in ``n``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planaria.config.bounds import MIXTURE
from planaria.config.schema import DataConfig

Quotas = tuple[int, ...]
"""samples of each source in every block; (1,) for a single source"""


def quotas(data: DataConfig) -> Quotas:
    """How many samples of a block each source of ``data`` gets, in the order of ``data.sources``.

    The block is the smallest in which the shares are whole numbers, by the weights as they are written (0.7 is seven
    tenths); where none of at most ``MIXTURE`` samples is, the nearest shares in one of that size, by largest remainder.
    """
    weights = [Fraction(repr(one.weight)) for _, one in sorted(data.mixture.items())] or [Fraction(1)]
    shares = [weight / sum(weights) for weight in weights]
    size = math.lcm(*(share.denominator for share in shares))
    if size <= MIXTURE:
        return tuple(int(share * size) for share in shares)
    found = [int(share * MIXTURE) for share in shares]
    short = sorted(range(len(found)), key=lambda i: found[i] - shares[i] * MIXTURE)
    for i in short[: MIXTURE - sum(found)]:
        found[i] += 1
    return tuple(found)


class Turns:
    """The sources' turns, block after block.

    In every block each source has exactly its quota of turns. Its i-th comes at a random place in the i-th part of the
    block, of as many parts as it has turns (stratified sampling). So the shares hold at every length: among the first
    n samples a source of share w among K sources has n·w of them, give or take less than 1 + w·K. A strict rotation
    would be as even, but with a period: a replica that takes every second block could miss a source for good.
    """

    def __init__(self, quotas: Quotas, seed: int) -> None:
        self._quotas, self._seed, self._size = quotas, seed, sum(quotas)

    def at(self, n: int) -> tuple[int, int]:
        """The source of sample ``n`` ≥ 0, and how many samples before ``n`` are of the same source."""
        if len(self._quotas) == 1:
            return 0, n
        block, place = divmod(n, self._size)
        order = _order(self._quotas, self._seed, block)
        source = int(order[place])
        return source, block * self._quotas[source] + int(np.count_nonzero(order[:place] == source))

    def before(self, n: int) -> Sequence[int]:
        """Of each source, how many of the first ``n`` samples are from it."""
        if len(self._quotas) == 1:
            return [n]
        block, place = divmod(n, self._size)
        begun = np.bincount(_order(self._quotas, self._seed, block)[:place], minlength=len(self._quotas))
        return [block * quota + int(more) for quota, more in zip(self._quotas, begun, strict=True)]


@lru_cache(maxsize=8)
def _order(quotas: Quotas, seed: int, block: int) -> npt.NDArray[np.intp]:
    """The source of each sample of a block."""
    drawn = hashlib.shake_256(f"{seed} mixture {block}".encode()).digest(8 * sum(quotas))
    uniform = (np.frombuffer(drawn, "<u8") >> 11) * 2.0**-53
    sources = np.repeat(np.arange(len(quotas)), quotas)
    parts = np.concatenate([np.arange(quota) for quota in quotas])
    return sources[np.argsort((parts + uniform) / np.array(quotas)[sources], kind="stable")]
