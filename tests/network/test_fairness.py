"""Max-min fair rates by their definition, and the times that follow from them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.pipeline.network.fairness import completion_times, max_min_rates

Shared = tuple[list[list[str]], dict[str, float]]
NEAR = 1e-9


@st.composite
def shared(draw: st.DrawFn) -> Shared:
    """Flows over up to six links, some of which may be dead or without limit."""
    kinds = st.one_of(st.integers(1, 20).map(float), st.sampled_from([0.0, math.inf]))
    capacity = {f"l{n}": draw(kinds) for n in range(draw(st.integers(1, 6)))}
    routes = draw(
        st.lists(st.lists(st.sampled_from(sorted(capacity)), min_size=1, max_size=4, unique=True), max_size=10)
    )
    return routes, capacity


def used(link: str, routes: list[list[str]], rates: list[float]) -> float:
    return sum(rate for route, rate in zip(routes, rates, strict=True) if link in route)


@given(shared())
def test_no_link_carries_more_than_it_can(given_: Shared) -> None:
    routes, capacity = given_
    rates = max_min_rates(routes, capacity)
    assert all(used(link, routes, rates) <= room * (1 + NEAR) for link, room in capacity.items())


@given(shared())
def test_no_rate_can_grow_without_a_smaller_or_equal_one_falling(given_: Shared) -> None:
    """Every flow is held by a full link on which nobody is faster."""
    routes, capacity = given_
    rates = max_min_rates(routes, capacity)
    for route, rate in zip(routes, rates, strict=True):
        if all(capacity[link] == math.inf for link in route):
            assert rate == math.inf
            continue
        fastest = {link: max(r for o, r in zip(routes, rates, strict=True) if link in o) for link in route}
        assert any(
            used(link, routes, rates) >= capacity[link] * (1 - NEAR) and rate >= fastest[link] * (1 - NEAR)
            for link in route
        )


def test_the_text_book_example() -> None:
    """One flow over both links, one and two over each alone: the long one is held by the busier link."""
    routes = [["a", "b"], ["a"], ["b"], ["b"]]
    assert max_min_rates(routes, {"a": 10.0, "b": 9.0}) == [3.0, 7.0, 3.0, 3.0]


def test_a_link_that_is_named_twice_counts_once() -> None:
    assert max_min_rates([["a", "a"], ["a"]], {"a": 10.0}) == [5.0, 5.0]


@given(shared(), st.data())
def test_times_keep_to_capacities_and_nothing_ends_before_it_could(given_: Shared, data: st.DataObject) -> None:
    routes, capacity = given_
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=len(routes), max_size=len(routes)))
    times = completion_times(sizes, routes, capacity)
    for link, room in capacity.items():
        carried = [(time, size) for time, size, route in zip(times, sizes, routes, strict=True) if link in route]
        through = sum(size for time, size in carried if time < math.inf)
        last = max((time for time, _ in carried if time < math.inf), default=0.0)
        assert through <= room * last * (1 + NEAR) or not through or room == math.inf
    for time, size, route in zip(times, sizes, routes, strict=True):
        assert (time == math.inf) == (size > 0 and any(capacity[link] == 0 for link in route))


def test_who_is_through_leaves_room_to_the_others() -> None:
    """Both at 5 until the first is through after 2 s; then 10 for what is left of the second."""
    assert completion_times([10, 20], [["a"], ["a"]], {"a": 10.0}) == pytest.approx([2.0, 3.0])
