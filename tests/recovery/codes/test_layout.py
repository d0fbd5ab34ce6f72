"""The layout of a parity group: holders, reads of a rebuild, states of unequal length."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.recovery import codes
from planaria.recovery.codes import Layout, LossError

GROUPS = [(4, 1), (4, 2), (6, 2), (8, 3)]


def states(sizes):
    drawn = np.random.default_rng(1)
    odd = np.array([np.nan, -0.0, 1e-45], np.float32).view(np.uint8)
    found = [drawn.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    for state in found:
        state[: odd.size] = odd[: state.size]
    return found


def group(members, tolerate, size=None):
    return Layout(size or (1000,) * members, codes.code("auto", members, tolerate))


@pytest.mark.parametrize(("members", "tolerate"), [*GROUPS, (7, 1), (7, 2)])
def test_all_members_give_and_hold_equally(members, tolerate):
    layout = group(members, tolerate)
    for stripe in range(members):
        assert layout.holders(stripe) == tuple((stripe + n) % members for n in range(tolerate))
        assert sorted(layout.givers(stripe) + layout.holders(stripe)) == list(range(members))
        assert [layout.member(stripe, layout.shard(stripe, who)) for who in range(members)] == list(range(members))
    assert {len(layout.given(who)) for who in range(members)} == {members - tolerate}


@pytest.mark.parametrize(("members", "tolerate", "overhead"), [(4, 1, 1 / 3), (4, 2, 1.0), (6, 2, 0.5), (8, 3, 0.6)])
def test_parity_has_the_expected_memory_and_traffic(members, tolerate, overhead):
    size = 80_000
    layout = Layout((size,) * members, codes.code("auto", members, tolerate))
    held = [0] * members
    for (_, who), parity in layout.parities(states(layout.sizes)).items():
        held[who] += parity.size
    assert all(bytes_ / size == pytest.approx(overhead, rel=0.01) for bytes_ in held)
    assert layout.overhead == pytest.approx(overhead, rel=0.01)
    reads = layout.reads([2], 2, parity=False)
    assert sum(map(len, reads.values())) * layout.block == pytest.approx((members - tolerate) * size, rel=0.01)
    assert sum(map(len, layout.reads([2], 2).values())) * layout.block == pytest.approx(members * size, rel=0.01)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("members", "tolerate"), GROUPS)
def test_every_loss_set_is_rebuilt_with_its_parity(members, tolerate):
    sizes = (*(100 + 37 * n for n in range(members - 1)), 0)
    layout, whole = Layout(sizes, codes.code("auto", members, tolerate)), states(sizes)
    there = layout.parities(whole)
    there.update({(t, who): block for who in range(members) for t, block in layout.cut(who, whole[who]).items()})
    for lost in (lost for count in range(1, tolerate + 1) for lost in combinations(range(members), count)):
        for heir in lost:
            back = {}
            for stripe, donors in layout.reads(lost, heir).items():
                assert not set(donors) & set(lost)
                back[stripe] = layout.rebuild(stripe, heir, {who: there[stripe, who] for who in donors})
            assert layout.join(heir, back).tobytes() == whole[heir].tobytes()
            for stripe in set(range(members)) - set(layout.given(heir)):
                assert back[stripe].tobytes() == there[stripe, heir].tobytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=5, max_size=5), st.integers(1, 3))
def test_cut_and_join_are_inverse(sizes, tolerate):
    layout, whole = group(5, tolerate, tuple(sizes)), states(sizes)
    for who, state in enumerate(whole):
        blocks = layout.cut(who, state.tobytes())
        assert all(block.size <= layout.block for block in blocks.values())
        assert layout.join(who, blocks).tobytes() == state.tobytes()


@pytest.mark.parametrize(("members", "tolerate"), GROUPS)
def test_too_many_losses_are_refused(members, tolerate):
    layout = group(members, tolerate)
    lost = list(range(tolerate + 1))
    named = ", ".join(map(str, lost))
    assert layout.reads(lost, 0) == f"members {named} of {members} cannot be rebuilt together"
    with pytest.raises(LossError, match=r"stripe 1: members none do not suffice to rebuild member 0"):
        layout.rebuild(1, 0, {})


def test_a_flipped_bit_counts_as_a_loss():
    """The caller checks checksums and omits damaged blocks."""
    from zlib import crc32

    layout = group(5, 2)
    whole = states(layout.sizes)
    there = layout.parities(whole)
    there.update({(t, who): b.copy() for who in range(5) for t, b in layout.cut(who, whole[who]).items()})
    sums = {key: crc32(block) for key, block in there.items()}
    for place in list(there):
        damaged = dict(there)
        damaged[place] = there[place].copy()
        damaged[place][there[place].size // 2] ^= 4
        bad = {key for key, block in damaged.items() if crc32(block) != sums[key]}
        assert bad == {place}
        stripe, member = place
        heir = (member + 1) % 5
        lost = {member, heir}
        donors = layout.reads(lost, heir)[stripe]
        back = layout.rebuild(stripe, heir, {who: damaged[stripe, who] for who in donors})
        assert back[: there[stripe, heir].size].tobytes() == there[stripe, heir].tobytes()
        assert isinstance(layout.reads({*lost, (member + 2) % 5}, member), str)


def test_a_rebuild_reads_three_blocks_per_stripe_with_local_groups():
    layout = Layout((500,) * 16, codes.code("local", 16, 6))
    assert {len(donors) for donors in layout.reads([5], 5).values()} == {3}
    assert len(layout.reads([5], 5)) == 16 and len(layout.reads([5], 5, parity=False)) == 8


def test_invalid_sizes_are_refused():
    with pytest.raises(ValueError, match="3 members and a code of 4 shards"):
        Layout((1, 1, 1), codes.code("auto", 4, 1))
    with pytest.raises(ValueError, match="each has 0 to"):
        group(4, 1, (1, 1, 1, 1 << 60))
    with pytest.raises(ValueError, match=r"member 1: 1000 bytes, not uint8 of shape \(7,\)"):
        group(4, 1).cut(1, b"1234567")
