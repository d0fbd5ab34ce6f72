"""Who differs: by the digests that replicas tell of their weights."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from planaria.control import decisions as d
from planaria.control.saving import unequal


def test_of_two_nobody_knows_which_is_wrong() -> None:
    assert unequal({1: {0: "a", 1: "b"}}) == [d.Unequal(stage=1, replicas=[0, 1], odd=[])]


def test_of_three_the_odd_one_is_named_by_stage() -> None:
    told = {0: {0: "a", 1: "a", 2: "a"}, 1: {0: "b", 1: "c", 2: "b"}, 2: {0: "a", 1: "b", 2: "c"}}
    assert unequal(told) == [
        d.Unequal(stage=1, replicas=[0, 1, 2], odd=[1]),
        d.Unequal(stage=2, replicas=[0, 1, 2], odd=[]),
    ]


@given(st.dictionaries(st.integers(0, 9), st.sampled_from("abc"), min_size=1))
def test_the_odd_ones_are_those_outside_a_strict_majority(told: dict[int, str]) -> None:
    found = unequal({3: told})
    assert bool(found) == (len(set(told.values())) > 1)
    for one in found:
        majority = [value for value, count in Counter(told.values()).items() if 2 * count > len(told)]
        assert one.odd == sorted(replica for replica, value in told.items() if majority and value not in majority)
