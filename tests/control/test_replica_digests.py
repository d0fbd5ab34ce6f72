"""Unequal replicas, identified by digests of their weights."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from planaria.control.checkpoint_decisions import stages_with_unequal_weights
from planaria.control.facts import decisions as d


def test_of_three_replicas_the_minority_is_blamed_by_stage() -> None:
    digests = {0: {0: "a", 1: "a", 2: "a"}, 1: {0: "b", 1: "c", 2: "b"}, 2: {0: "a", 1: "b", 2: "c"}}
    assert stages_with_unequal_weights(digests) == [
        d.UnequalReplicas(stage=1, replicas=[0, 1, 2], differing=[1]),
        d.UnequalReplicas(stage=2, replicas=[0, 1, 2], differing=[]),
    ]


@given(st.dictionaries(st.integers(0, 9), st.sampled_from("abc"), min_size=1))
def test_replicas_outside_a_strict_majority_are_blamed(digests: dict[int, str]) -> None:
    found = stages_with_unequal_weights({3: digests})
    assert bool(found) == (len(set(digests.values())) > 1)
    for one in found:
        majority = [value for value, count in Counter(digests.values()).items() if 2 * count > len(digests)]
        assert one.differing == sorted(
            replica for replica, value in digests.items() if majority and value not in majority
        )
