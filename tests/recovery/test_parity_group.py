"""Parity groups of snapshots: who holds which parity, and the reads of a rebuild."""

from __future__ import annotations

import pytest

from planaria.recovery import codes
from planaria.recovery.snapshot import ParityGroup

GROUPS = pytest.mark.parametrize(("members", "tolerate"), [(4, 1), (4, 2), (6, 2), (8, 3)])


def group(members: int, tolerate: int, kind: str = "auto") -> ParityGroup:
    return ParityGroup(codes.make_code(kind, members, tolerate))


@GROUPS
def test_all_members_give_and_hold_equally(members: int, tolerate: int) -> None:
    made = group(members, tolerate)
    for stripe in range(members):
        assert made.parity_members(stripe) == tuple((stripe + n) % members for n in range(tolerate))
        assert sorted(made.data_members(stripe) + made.parity_members(stripe)) == list(range(members))
        shards = [made.shard(stripe, member) for member in (*made.data_members(stripe), *made.parity_members(stripe))]
        assert shards == list(range(members))
    assert {len(made.data_stripes(member)) for member in range(members)} == {members - tolerate}


@GROUPS
def test_a_rebuild_reads_k_blocks_per_stripe_and_too_many_losses_have_none(members: int, tolerate: int) -> None:
    made = group(members, tolerate)
    reads = made.members_to_read([2], 2)
    assert reads is not None and {len(donors) for donors in reads.values()} == {members - tolerate}
    assert reads.keys() == {*range(members)} and not any(2 in donors for donors in reads.values())
    assert made.members_to_read(range(tolerate + 1), 0) is None


def test_a_rebuild_reads_three_blocks_per_stripe_with_local_groups() -> None:
    reads = group(16, 6, "local").members_to_read([5], 5)
    assert reads is not None and len(reads) == 16 and {len(donors) for donors in reads.values()} == {3}
