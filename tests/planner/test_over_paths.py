"""A plan's edges over several paths: shared capacities hold, the step is the clock's, changes move few edges."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.pipeline.network.costs import message_bytes
from planaria.pipeline.network.topology import Topology, read
from planaria.planner.bound.step_bound import step_lower_bound
from planaria.planner.flows import search_flows
from planaria.planner.guidelines import find_violations
from planaria.planner.initial_plans import random_routes
from planaria.planner.over_paths import ROUNDS, MultipathPlanner
from planaria.planner.problem import PlanningProblem, Solution, problem_of
from planaria.planner.schedule import ProvedBound, SearchRecord, make_schedule
from planaria.planner.schedule import read as read_schedule
from planaria.planner.schedule import write as write_schedule
from planaria.planner.search import SearchBudget, SearchResult, search, step_ns

LINKS = """
[[link]]
id = "north"
sites = ["A", "B"]
latency_ms = 5
bandwidth_mbit = {north}
[[link]]
id = "south"
sites = ["A", "B"]
latency_ms = 5
bandwidth_mbit = {south}
[[nodes]]
site = "A"
count = 5
[[nodes]]
site = "B"
count = 5
"""
CONFIG = RunConfig.model_validate(
    {
        "pipeline": {"stages": 4, "microbatches": 6, "microbatch_size": 2},
        "routing": {"data_nodes": 2},
        "network": {"forward_s": [0.0, 0.004, 0.004, 0.004, 0.004], "backward_s": [0.0, 0.006, 0.006, 0.006, 0.006]},
    }
)
SIZE = message_bytes(CONFIG.model, CONFIG.pipeline).larger


def topology(folder: Path, north: float = 100, south: float = 100, scale: float = 1.0) -> Topology:
    (folder / "topology.toml").write_text(LINKS.format(north=north, south=south))
    return read(folder / "topology.toml", scale)


def planned(found: Topology) -> tuple[PlanningProblem, Solution, MultipathPlanner]:
    problem = problem_of(CONFIG, found)
    stages = [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]  # of every stage one node at each site
    return problem, random_routes(problem, stages, random.Random(3), 0), MultipathPlanner(found, SIZE)


def test_every_message_between_sites_is_counted_in_both_directions(tmp_path: Path) -> None:
    found = topology(tmp_path)
    problem, solution, over = planned(found)
    site = [node.site for node in found.nodes]
    expected = Counter[tuple[int, int]]()
    for route in solution.routes:
        for n in range(len(route) - 1):
            expected[route[n], route[n + 1]] += SIZE
            expected[route[n + 1], route[n]] += SIZE
    flows = over.edges(problem, solution)
    assert {edge: flow.size for edge, flow in flows.items()} == {
        (a, b): size for (a, b), size in expected.items() if site[a] != site[b]
    }
    assert all((flow.source, flow.target) == (site[a], site[b]) for (a, b), flow in flows.items())


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_promised_rates_fit_the_links_and_the_clock_uses_them(tmp_path: Path, scale: float) -> None:
    found = topology(tmp_path, scale=scale)
    problem, solution, over = planned(found)
    routed = over.route(problem, solution)
    used = Counter[str]()
    for path, rate in zip(routed.assignment, routed.rates, strict=True):
        for link in path.links:
            used[link] += rate  # type: ignore[assignment]
    assert all(used[link] <= room * (1 + 1e-9) for link, room in over.path_network.capacity.items())
    assert over.path_network.capacity["north: A → B"] == pytest.approx(100e6 / 8 / scale)
    priced = over.with_path_costs(problem, routed)
    for (a, b), rate in zip(routed.edges, routed.rates, strict=True):
        assert priced.prices.transmit(a, b, "forward") == pytest.approx(SIZE / rate * 1e9, abs=1)
        assert priced.prices.carry(a, b, "forward") == pytest.approx((scale * 0.005 + SIZE / rate) * 1e9, abs=1)
    same = [(a, b) for a in range(5) for b in range(5) if a != b]
    assert all(priced.prices.carry(a, b, "forward") == problem.prices.carry(a, b, "forward") for a, b in same)
    # With less bandwidth than an edge has alone, a step is not shorter; nor than the busiest link's load.
    assert step_lower_bound(problem).step_s * 1e9 <= step_ns(problem, solution) <= step_ns(priced, solution)
    assert step_ns(priced, solution) >= routed.largest_s * 1e9


def test_two_links_are_better_than_one_of_them_and_hashing_than_neither(tmp_path: Path) -> None:
    problem, solution, over = planned(topology(tmp_path))
    routed = over.route(problem, solution)
    assert {path.id for path in routed.assignment} == {"north", "south"}
    one = over.route(problem, solution, lambda flows, ways: tuple(ways.living(f.source, f.target)[0] for f in flows))
    assert routed.largest_s <= 0.6 * one.largest_s
    kept = over.path_choice(routed)
    assert 0 < kept.least_s <= kept.largest_s == routed.largest_s
    step_s = step_ns(over.with_path_costs(problem, routed), solution) / 1e9
    assert over.mean_hashed_s(problem, solution) >= 0.99 * step_s


def test_a_search_returns_the_best_of_its_plans_on_their_paths(tmp_path: Path) -> None:
    found = topology(tmp_path, north=20, south=20)
    problem, reported = problem_of(CONFIG, found), list[SearchResult]()
    over = MultipathPlanner(found, SIZE)
    best = over.search(problem, 3, SearchBudget(moves=1600), reported.append)
    assert best == reported[-1] and best.moves == 1600 and len(reported) == ROUNDS
    assert best.step_s == min(one.step_s for one in reported) == over.step_ns(problem, best.solution) / 1e9
    blind = search(problem, 3, SearchBudget(moves=1600 / ROUNDS))
    assert best.step_s <= over.step_ns(problem, blind.solution) / 1e9
    assert best.step_s >= step_lower_bound(problem).step_s


def test_nothing_is_shared_if_all_nodes_are_at_one_site(tmp_path: Path) -> None:
    found = topology(tmp_path)
    alone = replace(found, nodes=tuple(replace(node, site="A") for node in found.nodes))
    problem, over = problem_of(CONFIG, alone), MultipathPlanner(alone, SIZE)
    best = over.search(problem, 3, SearchBudget(moves=80))
    assert over.route(problem, best.solution).edges == ()
    assert best.step_s == step_ns(problem, best.solution) / 1e9


@pytest.mark.slow
def test_a_schedule_keeps_the_paths_and_gives_the_same_simulation(tmp_path: Path) -> None:
    problem, solution, over = planned(topology(tmp_path))
    routed = over.route(problem, solution)
    priced = over.with_path_costs(problem, routed)
    bound, made = ProvedBound(**step_lower_bound(problem)._asdict()), SearchRecord(seed=3, moves=0, seconds=0.0)
    schedule = make_schedule(
        priced, solution, step_ns(priced, solution) / 1e9, bound, {}, made, over.path_choice(routed)
    )
    write_schedule(schedule, tmp_path / "schedule.json")
    read_again = read_schedule(tmp_path / "schedule.json")
    assert read_again == schedule
    assert np.array_equal(read_again.problem.link, priced.link)
    assert step_ns(read_again.problem, read_again.solution) == step_ns(priced, solution)
    text = (tmp_path / "schedule.json").read_text().replace('"target": 0,', '"target": 10,', 1)
    (tmp_path / "schedule.json").write_text(text)
    with pytest.raises(UserError, match=r"schedule\.json: paths\.edges\.\d+: .* → 10: there are 10 nodes"):
        read_schedule(tmp_path / "schedule.json")


def test_a_slower_link_moves_its_own_edges_only(tmp_path: Path) -> None:
    problem, solution, before = planned(topology(tmp_path))
    kept = before.path_choice(before.route(problem, solution))
    was = [edge.path for edge in kept.edges]
    same = before.adapt_paths(problem, solution, kept, 0)
    assert [path.id for path in same.assignment] == was
    over = MultipathPlanner(topology(tmp_path, north=20), SIZE)
    now = over.adapt_paths(problem, solution, kept, 0)
    pairs = list(zip(was, (path.id for path in now.assignment), strict=True))
    assert ("south", "north") not in pairs and ("north", "south") in pairs
    better = over.adapt_paths(problem, solution, kept, 100)
    assert better.largest_s <= now.largest_s


def test_edges_of_a_missing_link_move_to_the_others(tmp_path: Path) -> None:
    problem, solution, before = planned(topology(tmp_path))
    kept = before.path_choice(before.route(problem, solution))
    text = (tmp_path / "topology.toml").read_text().split("[[link]]")
    (tmp_path / "topology.toml").write_text("[[link]]" + text[2])
    now = MultipathPlanner(read(tmp_path / "topology.toml"), SIZE).adapt_paths(problem, solution, kept, 0)
    assert {path.id for path in now.assignment} == {"south"}


def test_a_link_too_slow_for_a_microbatch_is_named(tmp_path: Path) -> None:
    problem, solution, _ = planned(topology(tmp_path))
    slow = topology(tmp_path, north=0.001, south=0.001, scale=1e6)
    over = MultipathPlanner(slow, SIZE)
    with pytest.raises(UserError, match=r"network\.topology: link '(north|south)': .*raise its bandwidth"):
        over.with_path_costs(problem, over.route(problem, solution))


def test_flows_are_searched_over_several_paths(tmp_path: Path) -> None:
    found = topology(tmp_path)
    problem, over = problem_of(CONFIG, found), MultipathPlanner(found, SIZE, search_flows)
    match = over.search(problem, 0, SearchBudget(moves=800))
    assert match.moves == 800 and find_violations(problem, match.solution) == []
    assert match.step_s == over.step_ns(problem, match.solution) / 1e9
