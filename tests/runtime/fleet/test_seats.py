"""Assigning seats to workers: never two to a seat, spread over the nodes, on no node that may have failed."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.runtime.fleet.seats import Seat, Seats

NODES = {"a": 3, "b": 2, "c": 1}


def placed() -> Seats:
    """Six seats in group 0 on three nodes."""
    seats = Seats()
    seats.placed(0, dict(enumerate(node for node, number in NODES.items() for _ in range(number))))
    return seats


@given(st.lists(st.sampled_from(["take", "free", "rest", "move", "lose", "shun"]), max_size=40), st.randoms())
def test_no_seat_is_assigned_twice_and_none_on_a_shunned_node(story: list[str], rng: Random) -> None:
    seats, taken, resting = placed(), dict[Seat, str](), set[Seat]()
    for deed in story:
        match deed:
            case "take":
                if (found := seats.take()) is not None:
                    seat, node = found
                    assert seat not in taken and seat not in resting
                    assert node not in seats.shunned
                    taken[seat] = node
            case "free" | "rest" if taken:
                seat = rng.choice(sorted(taken))
                del taken[seat]
                if deed == "free":
                    seats.free(seat)
                else:
                    seats.rest(seat)
                    resting.add(seat)
            case "move" | "lose":
                bundle = rng.randrange(6)
                seats.placed(0, {bundle: "d" if deed == "move" else None})
                resting = {s for s in resting if seats.resting_at(s) is not None}
            case "shun":
                seats.shunned.add(rng.choice(sorted(NODES)))


def test_workers_are_spread_over_the_nodes() -> None:
    seats = placed()
    nodes = [found[1] for _ in range(6) if (found := seats.take())]
    assert set(nodes[:3]) == set(NODES) and Counter(nodes) == NODES
    assert seats.take() is None


def test_a_seat_rests_until_its_node_has_answered_or_it_has_moved() -> None:
    seats = Seats()
    seats.placed(0, {0: "a", 1: "a"})
    one, other = (found[0] for _ in range(2) if (found := seats.take()))
    seats.rest(one)
    seats.rest(other)
    assert seats.take() is None and seats.resting_at(one) == "a"
    seats.free(one)
    seats.placed(0, {0: "a", 1: "b"})
    again = {found for _ in range(2) if (found := seats.take())}
    assert again == {(one, "a"), (other, "b")}


def test_a_seat_without_room_counts_as_coming_and_one_that_rests_long_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = Seats()
    seats.placed(0, {0: None, 1: "a"})
    assert seats.to_come() == 2
    seats.rest(seats.take()[0])
    assert seats.to_come() == 2
    monkeypatch.setattr("planaria.runtime.fleet.seats._REST_S", 0.0)
    assert seats.to_come() == 1


def test_unused_extra_seats_are_returned_and_those_of_the_recipe_are_not() -> None:
    seats = Seats()
    for group, node in enumerate("abc"):
        seats.placed(group, {0: node})
    assert seats.idle(60.0) == [] and seats.idle(0.0) == [1, 2]
    taken = [found[0] for _ in range(2) if (found := seats.take())]
    assert taken == [Seat(0, 0), Seat(1, 0)] and seats.idle(0.0) == [2]
    seats.free(taken[1])
    assert seats.idle(0.0) == [1, 2]
    seats.forget(1)
    assert seats.idle(0.0) == [2]
