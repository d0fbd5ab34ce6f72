"""The keyed permutation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.data.permutation import permute

keys = st.binary(min_size=0, max_size=64)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 5000), key=keys)
def test_every_index_has_its_own_image(size: int, key: bytes) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@given(size=st.integers(50, 10**15), one=keys, other=keys)
def test_another_key_gives_another_order(size: int, one: bytes, other: bytes) -> None:
    indices = range(30)
    if one != other and one.rstrip(b"\0") != other.rstrip(b"\0"):
        assert [permute(i, size, one) for i in indices] != [permute(i, size, other) for i in indices]


def test_the_order_is_pinned() -> None:
    """Resumed runs depend on it."""
    assert [permute(i, 10, b"planaria") for i in range(10)] == [6, 5, 3, 9, 4, 7, 0, 2, 8, 1]


def test_neighbours_are_scattered() -> None:
    """Of 4,999 ascending neighbours, about one remains in a random order."""
    order = [permute(i, 5000, b"key") for i in range(5000)]
    assert sum(b == a + 1 for a, b in pairwise(order)) < 15
    half = sum(order[:2500]) / 2500
    assert abs(half - 2499.5) < 100  # five standard errors of the mean of half of them


@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        permute(index, 7, b"")
