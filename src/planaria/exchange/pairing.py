"""Who meets whom in a round: groups drawn from a seed that all peers share, without a message."""

from __future__ import annotations

import random
from collections.abc import Sequence


def random_groups(round: int, members: Sequence[int], size: int, seed: int) -> list[tuple[int, ...]]:
    """``members`` in groups of ``size``, drawn anew in every ``round``; ids within a group in order.

    One permutation, cut with a stride: groups {π_k, π_{k+K}, π_{k+2K}, …} for k < K = ⌈N / size⌉ (arXiv 2506.10911's
    released code, for N divisible by the size). Where N is not, some groups are smaller by one; with pairs, one member
    sits out. A string as seed is hashed by SHA-512, so the draw is the same on every platform; a cipher on so small a
    range would not reach all permutations.

    :raises ValueError: when a member is named twice, or a group is to have none.
    """
    if len(set(members)) < len(members):
        raise ValueError(f"a member is named twice: {sorted(members)}")
    if size < 1:
        raise ValueError(f"groups of {size} cannot be formed")
    order = sorted(members)
    random.Random(f"exchange/{seed}/{round}").shuffle(order)
    count = -(-len(order) // size)
    return [tuple(sorted(order[k::count])) for k in range(count)]


def one_group(members: Sequence[int]) -> list[tuple[int, ...]]:
    """All ``members`` together."""
    return [tuple(sorted(members))] if members else []
