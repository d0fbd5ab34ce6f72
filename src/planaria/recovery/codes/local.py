"""Local groups: a parity per few shards repairs one loss cheaply; global parities over GF(2⁸) repair several.

Shards: k data, g global parities, then the XOR of each group. At best, every set of losses is repaired that leaves at
most g after one loss of each group. The coefficients are the first of a fixed sequence that survive every set of
``tolerate`` losses, by enumeration.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from planaria.common.errors import UserError
from planaria.recovery.codes.base import CodeFamily, ErasureCode, product, require_valid_sizes, tolerates
from planaria.recovery.codes.field import INVERSE, Bytes

TRIES = 64


class LocalCodes(CodeFamily):
    """Local groups of ``group`` members, including the local parity."""

    group: int = Field(default=4, ge=2)
    """members of a local group; a lost one is the XOR of the group - 1 others"""

    def code(self, members: int, tolerate: int) -> ErasureCode:
        require_valid_sizes(members, tolerate)
        groups = -(-members // self.group)
        globals_ = required_parities(tolerate, self.group)
        data = members - groups - globals_
        if data < 1:
            raise UserError(
                f"code = 'local': {members} members in groups of {self.group} cannot survive any {tolerate} losses; "
                "lower tolerate or use 'reed_solomon'"
            )
        for seed in range(TRIES):
            candidate = local(data, globals_, groups, seed)
            if tolerates(candidate, tolerate):
                return candidate
        raise UserError(
            f"code = 'local': no code of {members} shards found for any {tolerate} losses; use 'reed_solomon'"
        )


def required_parities(tolerate: int, group: int) -> int:
    """Return the global parities that any ``tolerate`` losses require.

    In the worst case each full group, and the rest in another, is repaired by its own parity once.
    """
    full, rest = divmod(tolerate, group)
    return full * (group - 1) + max(0, rest - 1)


def local(data: int, globals_: int, groups: int, seed: int) -> ErasureCode:
    """Return the code with these numbers of shards; ``seed`` chooses the coefficients of the global parities."""
    points = np.random.default_rng(seed).permutation(256).astype(np.uint8)
    cauchy: Bytes = INVERSE[points[:globals_, None] ^ points[None, globals_ : globals_ + data]]
    first = np.concatenate([np.eye(data, dtype=np.uint8), cauchy])
    parts = np.array_split(np.arange(data + globals_), groups)
    sums = np.zeros((groups, data + globals_), np.uint8)
    for n, part in enumerate(parts):
        sums[n, part] = 1
    checks = tuple(frozenset([*part.tolist(), data + globals_ + n]) for n, part in enumerate(parts))
    return ErasureCode(np.concatenate([cauchy, product(sums, first)]), checks)
