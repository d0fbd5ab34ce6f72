"""The protocol of erasure codes: compute parities, choose the shards to read after a loss, rebuild the lost ones.

A code has n shards: data 0 … k−1, then parities k … n−1, each a weighted sum of the data over GF(2⁸). Planning is
elimination over shard numbers; bytes are passed over once. Callers check checksums and treat a damaged shard as lost.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.common.errors import UserError
from planaria.config.registry import Choice
from planaria.recovery.codes.field import PRODUCT, Bytes, combine, rank, solve_in_columns

MAX_SHARDS = 256
"""shards of one code: the elements of GF(2⁸)"""
MAX_BYTES = 1 << 36
"""bytes of the largest shard"""
MAX_LOSS_SETS = 1_000_000
"""maximum number of loss sets that one call enumerates"""


class LossError(Exception):
    """The remaining shards do not determine the lost ones; the message names both."""


@dataclass(frozen=True, eq=False)
class ErasureCode:
    """An erasure code: its parities, and the checks for cheap repairs."""

    weights: Bytes
    """[n − k, k]: coefficient of each data shard in each parity"""
    checks: tuple[frozenset[int], ...] = ()
    """sets of shards in which each is the sum of the others; tried first"""

    @property
    def data(self) -> int:
        """k, the number of data shards."""
        return int(self.weights.shape[1])

    @property
    def shards(self) -> int:
        """n, the number of all shards."""
        return int(sum(self.weights.shape))

    @cached_property
    def generator(self) -> Bytes:
        """[k, n]: coefficient of each data shard in each shard."""
        return np.concatenate([np.eye(self.data, dtype=np.uint8), self.weights.T], axis=1)

    def encode(self, shards: Sequence[Any]) -> list[Bytes]:
        """Return the n − k parities of k data shards (bytes, numpy arrays or CPU tensors of uint8), as long as the
        longest.

        Shorter shards are padded with zeros.

        :raises ValueError: for another number of shards, other types, or more than :data:`MAX_BYTES` each.
        """
        if len(shards) != self.data:
            raise ValueError(f"{len(shards)} shards for a code of {self.data}")
        rows = [_bytes(shard) for shard in shards]
        return combine(self.weights, rows, max(shard.size for shard in rows))

    def plan(self, lost: Collection[int], wanted: Collection[int] | None = None) -> tuple[int, ...] | str:
        """Return the shards to read for the ``wanted`` ones (default: all lost), or why they cannot be rebuilt.

        Checks that need the fewest further reads come first; elimination over all remaining shards is last.
        """
        missing = self._require_shards(lost)
        requested = missing if wanted is None else self._require_shards(wanted) & missing
        order = self._by_checks(missing, requested)
        order += [shard for shard in range(self.shards) if shard not in missing and shard not in order]
        coefficients = solve_in_columns(self.generator[:, order], self.generator[:, sorted(requested)])
        if coefficients is None:
            return f"shards {_list(requested)} cannot be rebuilt: {_list(missing)} of {self.shards} are lost"
        return tuple(sorted(order[n] for n in np.flatnonzero(coefficients.any(axis=0))))

    def repair(self, reads: Mapping[int, Any], wanted: Collection[int]) -> dict[int, Bytes]:
        """Return the ``wanted`` shards, by number, from those read; all others count as lost.

        :raises LossError: if the shards read do not suffice.
        :raises ValueError: for an invalid shard number, or shards of unequal lengths.
        """
        order, requested = sorted(self._require_shards(reads)), sorted(self._require_shards(wanted))
        rows = [_bytes(reads[shard]) for shard in order]
        if len({shard.size for shard in rows}) > 1:
            raise ValueError(f"shards of unequal lengths: {_list(shard.size for shard in rows)} bytes; pad them")
        coefficients = solve_in_columns(self.generator[:, order], self.generator[:, requested])
        if coefficients is None:
            raise LossError(
                f"shards {_list(requested)} cannot be rebuilt from {_list(order) or 'none'} of {self.shards}"
            )
        return dict(zip(requested, combine(coefficients, rows, rows[0].size if rows else 0), strict=True))

    def _require_shards(self, numbers: Collection[int]) -> set[int]:
        if invalid := [number for number in numbers if not 0 <= number < self.shards]:
            raise ValueError(f"shards {_list(invalid)}: there are {self.shards}")
        return set(numbers)

    def _by_checks(self, lost: set[int], requested: set[int]) -> list[int]:
        """Return the reads for repairs by checks, cheapest first, those of wanted shards before others."""
        reads: list[int] = []
        missing, unplanned = set(lost), set(requested)
        while unplanned:
            usable = [check for check in self.checks if len(check & missing) == 1]
            if not usable:
                break
            best = min(usable, key=lambda check: (not check & unplanned, len(check - lost - set(reads)), sorted(check)))
            reads += sorted(best - lost - set(reads))
            missing -= best
            unplanned -= best
        return reads


class CodeFamily(Choice):
    """A family of codes, chosen by name; its options are its fields."""

    @abstractmethod
    def code(self, members: int, tolerate: int) -> ErasureCode:
        """Return the code of ``members`` shards that survives the loss of any ``tolerate``.

        :raises UserError: if this family has none.
        """


def require_valid_sizes(members: int, tolerate: int) -> None:
    """Check a group's size.

    :raises UserError: if no code supports it.
    """
    if not 1 <= tolerate < members:
        raise UserError(f"tolerate = {tolerate}: a group of {members} can lose 1 to {members - 1}; change it")
    if members > MAX_SHARDS:
        raise UserError(f"a parity group of {members}: codes have at most {MAX_SHARDS} shards; make smaller groups")


def product(left: Bytes, right: Bytes) -> Bytes:
    """Return the product of two matrices [a, b], [b, c] over the field."""
    sums: Bytes = np.bitwise_xor.reduce(PRODUCT[left[:, :, None], right[None]], axis=1)
    return sums


def _bytes(shard: Any) -> Bytes:
    """Return ``shard`` as one row of bytes, without a copy."""
    flat = isinstance(shard, bytes | bytearray | memoryview)
    row: Bytes = np.frombuffer(shard, np.uint8) if flat else np.asarray(shard)
    if row.dtype != np.uint8 or row.ndim != 1:
        raise ValueError(f"a shard is one row of uint8, not {row.dtype} of shape {row.shape}")
    if row.size > MAX_BYTES:
        raise ValueError(f"a shard of {row.size} bytes: at most {MAX_BYTES}")
    return row


def _list(numbers: Collection[int] | Any) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def check_matrix(code: ErasureCode) -> Bytes:
    """Return the check matrix [n − k, n]: each row's weighted sum of the shards is zero."""
    return np.concatenate([code.weights, np.eye(len(code.weights), dtype=np.uint8)], axis=1)


def repairable_share(code: ErasureCode, lost: int) -> float:
    """Return the share of sets of ``lost`` shards that can be rebuilt: their columns of checks are independent.

    :raises UserError: if there are more than :data:`MAX_LOSS_SETS` sets.
    """
    count = comb(code.shards, lost)
    if count > MAX_LOSS_SETS:
        raise UserError(f"{count} sets of {lost} lost shards of {code.shards}: too many to try; use fewer")
    if lost > len(code.weights):
        return 0.0
    matrix, restored = check_matrix(code), 0
    for some in _loss_sets(code.shards, lost):
        restored += int((rank(matrix[:, some].transpose(1, 0, 2)) == lost).sum())
    return restored / count


def tolerates(code: ErasureCode, lost: int) -> bool:
    """Whether any ``lost`` shards can be rebuilt; UserError as in :func:`repairable_share`."""
    return repairable_share(code, lost) == 1


def repairable_shares(code: ErasureCode) -> list[float]:
    """Return :func:`repairable_share` for 0, 1, 2 … n − k lost shards."""
    return [repairable_share(code, lost) for lost in range(len(code.weights) + 1)]


def _loss_sets(shards: int, lost: int) -> Iterator[NDArray[np.int64]]:
    """Yield all sets, in arrays of bounded size."""
    sets = combinations(range(shards), lost)
    while some := list(islice(sets, 4096)):
        yield np.array(some, np.int64).reshape(len(some), lost)
