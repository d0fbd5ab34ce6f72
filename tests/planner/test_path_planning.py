"""Planned paths: no single move improves them, changes move only affected flows, and the bound holds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from benchmarks.paths import better_of_two, in_turn, leaf_spine, optimum, ring, small_instance, with_dead
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.pipeline.network.multipath import Path, PathNetwork
from planaria.planner import paths
from planaria.planner.paths import (
    PathAssignment,
    SiteFlow,
    improve_paths,
    largest_load,
    plan_paths,
    random_paths,
    replan_paths,
    tightest_cut,
)

seeds = st.integers(0, 2**32)


def carried(flows: list[SiteFlow], ways: PathNetwork, chosen: PathAssignment) -> list[float]:
    """Return the loads of all links, largest first, recomputed."""
    on = dict.fromkeys(ways.capacity, 0)
    for flow, path in zip(flows, chosen, strict=True):
        for link in path.links:
            on[link] += flow.size
    return sorted((size / ways.capacity[link] for link, size in on.items() if size), reverse=True)


@given(seeds)
def test_every_flow_gets_a_live_path_between_its_sites(seed: int) -> None:
    flows, ways = small_instance(random.Random(seed))
    chosen = plan_paths(flows, ways)
    for flow, path in zip(flows, chosen, strict=True):
        assert path in ways.living(flow.source, flow.target)
    assert largest_load(flows, ways, chosen) == max(carried(flows, ways, chosen))


@given(seeds)
def test_no_single_move_lowers_the_largest_load_of_a_plan(seed: int) -> None:
    flows, ways = small_instance(random.Random(seed), most_flows=12, most_paths=6)
    chosen = plan_paths(flows, ways)
    largest = max(carried(flows, ways, chosen))
    for n, flow in enumerate(flows):
        for path in ways.living(flow.source, flow.target):
            assert max(carried(flows, ways, (*chosen[:n], path, *chosen[n + 1 :]))) >= largest
    assert improve_paths(flows, ways, chosen) is None


@given(seeds)
def test_the_bound_is_below_the_optimum_and_the_optimum_below_the_plan(seed: int) -> None:
    flows, ways = small_instance(random.Random(seed), most_flows=6, most_paths=3)
    best, planned = optimum(flows, ways), largest_load(flows, ways, plan_paths(flows, ways))
    assert tightest_cut(flows, ways).seconds <= best * (1 + 1e-9)
    assert best <= planned <= 1.5 * best


@given(seeds)
def test_each_move_from_a_hashed_start_lowers_loads(seed: int) -> None:
    flows, ways = small_instance(random.Random(seed))
    chosen = random_paths(flows, ways, seed)
    for _ in range(1000):
        better = improve_paths(flows, ways, chosen)
        if better is None:
            return
        assert sum(a != b for a, b in zip(chosen, better, strict=True)) <= 2
        assert carried(flows, ways, better) < carried(flows, ways, chosen)
        chosen = better
    pytest.fail("moves never end")


@given(seeds, st.floats(0, 2))
def test_a_change_moves_only_affected_flows(seed: int, times: float) -> None:
    flows, ways = small_instance(random.Random(seed))
    before = plan_paths(flows, ways)
    link = before[0].links[0]
    changed = replace(ways, capacity={**ways.capacity, link: ways.capacity[link] * times})
    try:
        after = replan_paths(flows, changed, before, {link})
    except UserError:
        assert times == 0
        return
    for old, new in zip(before, after, strict=True):
        assert old == new or link in old.links
        assert changed.bandwidth(new) > 0


def test_equal_flows_between_leaves_get_a_spine_each() -> None:
    flows, ways = ring(8, 8, 1), leaf_spine(8, 8, 200.0)
    assert carried(flows, ways, plan_paths(flows, ways)) == [1 / 200] * 128
    assert tightest_cut(flows, ways).seconds == pytest.approx(1 / 200)


def test_a_dead_uplink_moves_one_flow_and_the_result_is_optimal() -> None:
    flows, ways = ring(8, 8, 1), leaf_spine(8, 8, 200.0)
    before, dead = plan_paths(flows, ways), "leaf 0 → spine 0"
    alive = with_dead(ways, dead)
    after = replan_paths(flows, alive, before, {dead})
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    assert largest_load(flows, alive, after) == tightest_cut(flows, alive).seconds == 2 / 200
    assert tightest_cut(flows, alive).gap(2 / 200) == 0


TWO = tuple(Path(name, "a", "b", (name,)) for name in "xy")
TWO_LINKS = PathNetwork({("a", "b"): TWO}, {"x": 1.0, "y": 1.0})
FIVE_FLOWS = [SiteFlow("a", "b", size) for size in (3, 3, 2, 2, 2)]


def test_two_flows_are_exchanged_if_no_single_move_helps() -> None:
    """Largest first, sizes 3, 3, 2, 2, 2 give 7 and 5; 6 and 6 takes an exchange."""
    x, y = TWO
    start = (x, y, x, x, y)
    assert carried(FIVE_FLOWS, TWO_LINKS, start) == [7, 5]
    better = improve_paths(FIVE_FLOWS, TWO_LINKS, start)
    assert better is not None and carried(FIVE_FLOWS, TWO_LINKS, better) == [6, 6]
    assert carried(FIVE_FLOWS, TWO_LINKS, plan_paths(FIVE_FLOWS, TWO_LINKS)) == [6, 6]


def test_a_flow_without_a_path_is_named() -> None:
    flows, ways = ring(2, 1, 1), leaf_spine(2, 1, 200.0)
    alive = with_dead(ways, "leaf 0 → spine 0")
    for choose in (
        plan_paths,
        lambda f, w: replan_paths(f, w, plan_paths(f, ways), {"leaf 0 → spine 0"}),
        tightest_cut,
    ):
        with pytest.raises(UserError, match=r"^leaf 0 – leaf 1: no path is left between them") as error:
            choose(flows, alive)
        assert "\n" not in str(error.value)


def test_a_plan_of_many_flows_tries_a_limited_number_of_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MAX_SWAPS", 0)
    assert carried(FIVE_FLOWS, TWO_LINKS, plan_paths(FIVE_FLOWS, TWO_LINKS)) == [7, 5]


@settings(max_examples=30)
@given(seeds)
def test_baselines_choose_live_paths(seed: int) -> None:
    flows, ways = small_instance(random.Random(seed))
    for chosen in (random_paths(flows, ways, seed), better_of_two(flows, ways, seed), in_turn(flows, ways)):
        assert all(p in ways.living(f.source, f.target) for f, p in zip(flows, chosen, strict=True))
    assert random_paths(flows, ways, seed) == random_paths(flows, ways, seed)


def test_round_robin_uses_all_paths() -> None:
    flows, ways = ring(2, 8, 1), leaf_spine(2, 4, 1.0)
    ids = [path.id for path in in_turn(flows, ways)]
    assert ids == [f"spine {n % 4}" for n in range(8)] * 2
    assert all(a != b for a, b in pairwise(ids[:8]))
