"""Assigning bundles to workers: never two to a bundle, spread over the nodes, on no node that may have failed."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.runtime.fleet.bundles import Bundle, Bundles

NODES = {"a": 3, "b": 2, "c": 1}


def placed() -> Bundles:
    """Six bundles in group 0 on three nodes."""
    bundles = Bundles()
    bundles.placed(0, dict(enumerate(node for node, number in NODES.items() for _ in range(number))))
    return bundles


@given(st.lists(st.sampled_from(["take", "free", "rest", "move", "lose", "avoid"]), max_size=40), st.randoms())
def test_no_bundle_is_assigned_twice_and_none_on_a_avoided_node(actions: list[str], rng: Random) -> None:
    bundles, taken, resting = placed(), dict[Bundle, str](), set[Bundle]()
    for action in actions:
        match action:
            case "take":
                if (found := bundles.take()) is not None:
                    bundle, node = found
                    assert bundle not in taken and bundle not in resting
                    assert node not in bundles.avoided_nodes
                    taken[bundle] = node
            case "free" | "rest" if taken:
                bundle = rng.choice(sorted(taken))
                del taken[bundle]
                if action == "free":
                    bundles.free(bundle)
                else:
                    bundles.rest(bundle)
                    resting.add(bundle)
            case "move" | "lose":
                bundle = rng.randrange(6)
                bundles.placed(0, {bundle: "d" if action == "move" else None})
                resting = {s for s in resting if bundles.resting_at(s) is not None}
            case "avoid":
                bundles.avoided_nodes.add(rng.choice(sorted(NODES)))


def test_workers_are_spread_over_the_nodes() -> None:
    bundles = placed()
    nodes = [found[1] for _ in range(6) if (found := bundles.take())]
    assert set(nodes[:3]) == set(NODES) and Counter(nodes) == NODES
    assert bundles.take() is None


def test_a_bundle_rests_until_its_node_has_answered_or_it_has_moved() -> None:
    bundles = Bundles()
    bundles.placed(0, {0: "a", 1: "a"})
    one, other = (found[0] for _ in range(2) if (found := bundles.take()))
    bundles.rest(one)
    bundles.rest(other)
    assert bundles.take() is None and bundles.resting_at(one) == "a"
    bundles.free(one)
    bundles.placed(0, {0: "a", 1: "b"})
    again = {found for _ in range(2) if (found := bundles.take())}
    assert again == {(one, "a"), (other, "b")}


def test_a_bundle_without_room_will_be_free_and_one_that_rests_long_will_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundles = Bundles()
    bundles.placed(0, {0: None, 1: "a"})
    assert bundles.to_come() == 2
    bundles.rest(bundles.take()[0])
    assert bundles.to_come() == 2
    monkeypatch.setattr("planaria.runtime.fleet.bundles._REST_S", 0.0)
    assert bundles.to_come() == 1


def test_unused_extra_bundles_are_returned_and_those_of_the_recipe_are_not() -> None:
    bundles = Bundles()
    for group, node in enumerate("abc"):
        bundles.placed(group, {0: node})
    assert bundles.idle(60.0) == [] and bundles.idle(0.0) == [1, 2]
    taken = [found[0] for _ in range(2) if (found := bundles.take())]
    assert taken == [Bundle(0, 0), Bundle(1, 0)] and bundles.idle(0.0) == [2]
    bundles.free(taken[1])
    assert bundles.idle(0.0) == [1, 2]
    bundles.forget(1)
    assert bundles.idle(0.0) == [2]
