"""What a code survives, counted and not estimated: every set of lost shards is tried."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, islice
from math import comb

import numpy as np
from numpy.typing import NDArray

from planaria.common.errors import UserError
from planaria.recovery.codes.base import Code
from planaria.recovery.codes.field import Bytes, rank

MOST = 1_000_000
"""loss sets that are tried for one answer"""


def checks(code: Code) -> Bytes:
    """The check matrix [n − k, n]: every row's weighted sum of the shards is zero."""
    return np.concatenate([code.weights, np.eye(len(code.weights), dtype=np.uint8)], axis=1)


def share(code: Code, lost: int) -> float:
    """The share of the sets of ``lost`` shards that the others bring back: their columns of checks are independent.

    :raises UserError: when there are more than :data:`MOST` sets.
    """
    count = comb(code.shards, lost)
    if count > MOST:
        raise UserError(f"{count} sets of {lost} lost shards of {code.shards}: too many to try; take fewer")
    if lost > len(code.weights):
        return 0.0
    matrix, restored = checks(code), 0
    for some in _pieces(code.shards, lost):
        restored += int((rank(matrix[:, some].transpose(1, 0, 2)) == lost).sum())
    return restored / count


def tolerates(code: Code, lost: int) -> bool:
    """Whether any ``lost`` shards can be brought back; UserError as :func:`share`."""
    return share(code, lost) == 1


def shares(code: Code) -> list[float]:
    """:func:`share` of 0, 1, 2 … n − k lost."""
    return [share(code, lost) for lost in range(len(code.weights) + 1)]


def loss_chance(shares: list[float], shards: int, p: float) -> float:
    """P(data is lost) when each shard is lost with chance p, on its own: Σᵢ C(n,i) pⁱ (1−p)ⁿ⁻ⁱ (1 − shareᵢ)."""
    survived = [*shares, *[0.0] * (shards + 1 - len(shares))]
    return sum(comb(shards, i) * p**i * (1 - p) ** (shards - i) * (1 - each) for i, each in enumerate(survived))


def _pieces(shards: int, lost: int) -> Iterator[NDArray[np.int64]]:
    """All sets, in pieces of bounded size."""
    sets = combinations(range(shards), lost)
    while some := list(islice(sets, 4096)):
        yield np.array(some, np.int64).reshape(len(some), lost)
