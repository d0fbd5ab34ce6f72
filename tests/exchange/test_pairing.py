"""Groups: a partition of the members, the same for all peers, another one in every round."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_models import KINDS, make

from planaria.exchange.pairing import random_groups

MEMBERS = st.lists(st.integers(-5, 10**12), unique=True, min_size=1, max_size=40)


@given(MEMBERS, st.integers(2, 7), st.integers(0, 10**6), st.integers(0, 2**40))
def test_groups_part_the_members_into_as_few_groups_as_can_be(
    members: list[int], size: int, round: int, seed: int
) -> None:
    groups = random_groups(round, members, size, seed)
    assert sorted(member for group in groups for member in group) == sorted(members)
    assert len(groups) == -(-len(members) // size)
    assert max(map(len, groups)) <= size and max(map(len, groups)) - min(map(len, groups)) <= 1
    assert all(list(group) == sorted(group) for group in groups)


@given(MEMBERS, st.randoms(use_true_random=False), st.integers(0, 99), st.sampled_from(KINDS))
def test_all_peers_agree_on_the_groups_in_whatever_order_they_know_the_members(
    members: list[int], shuffler: object, round: int, kind: str
) -> None:
    other = list(members)
    shuffler.shuffle(other)  # type: ignore[attr-defined]
    made = make(kind)
    assert made.groups(round, members, 7) == made.groups(round, other, 7)


@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_with_an_odd_number_one_sits_out_and_never_the_same_one_for_long(count: int) -> None:
    lonely = [[g for g in random_groups(round, range(count), 2, 0) if len(g) == 1] for round in range(200)]
    assert {len(alone) for alone in lonely} == {count % 2}
    if count % 2:
        times = Counter(alone[0] for alone in lonely)
        assert len(times) == count and max(times.values()) < 2 * 200 / count


def test_groups_change_from_round_to_round_and_with_the_seed() -> None:
    drawn = [tuple(random_groups(round, range(32), 2, seed)) for round in range(20) for seed in range(5)]
    assert len(set(map(frozenset, drawn))) == len(drawn)


def test_every_pair_meets_equally_often() -> None:
    rounds = 6000
    met = Counter(group for round in range(rounds) for group in random_groups(round, range(6), 2, 3))
    expected = rounds / 5
    assert set(met) == set(combinations(range(6), 2))
    # Five standard deviations of a binomial count.
    assert all(abs(times - expected) < 5 * (expected * 0.8) ** 0.5 for times in met.values())


def test_the_draw_is_the_same_on_every_platform() -> None:
    assert random_groups(3, range(6), 2, 1) == PINNED


PINNED = [(0, 1), (2, 4), (3, 5)]


def test_members_named_twice_and_empty_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"named twice: \[1, 1, 2\]"):
        random_groups(0, [1, 2, 1], 2, 0)
    with pytest.raises(ValueError, match="groups of 0"):
        random_groups(0, [1, 2], 0, 0)


@pytest.mark.parametrize("kind", ["allreduce", "diloco", "streaming_diloco"])
def test_some_exchanges_bring_all_together(kind: str) -> None:
    assert make(kind).groups(4, [9, 2, 5], 0) == [(2, 5, 9)]


@pytest.mark.parametrize("kind", KINDS)
def test_without_members_there_are_no_groups(kind: str) -> None:
    assert make(kind).groups(0, [], 0) == []
