"""Local search over flows: valid plans within the budget, never better than the least objective, and its edge costs."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.planner import flow_along
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.cli import main
from planaria.cli.plan_search import plan_search
from planaria.config.schema import RoutingConfig
from planaria.planner import flows
from planaria.planner.anneal import Floats
from planaria.planner.flows import edge_costs, flow_costs, random_flows, search_flows
from planaria.planner.guidelines import find_violations
from planaria.planner.problem import NO_SAVING, PlanningProblem, Solution
from planaria.planner.schedule import read
from planaria.planner.search import SearchBudget, SearchResult, search, step_ns
from planaria.planner.tables import NO_SUMS, Ints
from support.planner_instances import RECIPE, problems, published, small_problem

SEEDS = st.integers(0, 2**32)
MOVES = SearchBudget(moves=300)


def same(one: SearchResult, other: SearchResult) -> bool:
    return all(a.tolist() == b.tolist() for a, b in zip(one.solution, other.solution, strict=True))


def even(problem: PlanningProblem) -> PlanningProblem:
    """Return the problem with equal directions of every link."""
    late = problem.link // 3
    return replace(problem, link=problem.link + problem.link.T, latency=late + late.T, saving=NO_SAVING)


def room(problem: PlanningProblem, start: Solution) -> Ints:
    """Return [nodes]: the slots, the share of the stage's visits by slots, or the visits at the start."""
    rooms = []
    for n in range(problem.nodes):
        stage = start.stage == start.stage[n]
        share = math.ceil(stage[start.path].sum() * problem.slots[n] / problem.slots[stage].sum())
        rooms.append(max(share, int(problem.slots[n]), int((start.path == n).sum())))
    return np.array(rooms)


@settings(max_examples=60, deadline=None)
@given(problems(), SEEDS, st.sampled_from(["sum", "two_way"]))
def test_plans_are_valid_and_repeat(problem: PlanningProblem, seed: int, rule: flows.EdgeRule) -> None:
    problem = replace(problem, sums=NO_SUMS)
    first, again = (search_flows(problem, seed, MOVES, rule=rule) for _ in range(2))
    assert find_violations(problem, first.solution) == []
    assert first.moves == 300 and same(first, again)
    assert first.step_s == step_ns(problem, first.solution) / 1e9


@settings(max_examples=40, deadline=None)
@given(problems(), SEEDS)
def test_both_rules_plan_alike_if_links_have_equal_directions(problem: PlanningProblem, seed: int) -> None:
    problem = even(replace(problem, sums=NO_SUMS))
    assert edge_costs(problem, "sum").tolist() == edge_costs(problem, "two_way").tolist()
    assert same(search_flows(problem, seed, MOVES, rule="sum"), search_flows(problem, seed, MOVES, rule="two_way"))


def test_both_rules_differ_on_links_of_unequal_directions() -> None:
    """100 and 10 Mbit/s: at the mean bandwidth, a transfer seems 3.025 times as fast as the mean of both directions."""
    link = np.array([[0, 100_000], [1_000_000, 0]])
    problem = small_problem([0, 1], (1, 1), link, forward=np.zeros((3, 2), int), backward=np.zeros((3, 2), int))
    published_rule, two_way = (edge_costs(problem, rule)[0, 0, 1] for rule in ("sum", "two_way"))
    assert two_way == 550_000 and two_way / published_rule == pytest.approx(3.025, abs=1e-4)


def test_latencies_are_averaged_by_both_rules() -> None:
    link, late = np.array([[0, 700], [1100, 0]]), np.array([[0, 500], [900, 0]])
    own = np.array([[40, 0], [0, 20], [4, 0]])
    problem = small_problem([0, 1], (1, 1), link, forward=own, backward=own, latency=late)
    for rule in ("sum", "two_way"):
        costs = edge_costs(problem, rule)
        assert costs[0, 0, 1] == 20 + 10 + 700 + 200 and costs[2, 1, 0] == 10 + 2 + 700 + 200


@settings(max_examples=40, deadline=None)
@given(problems(), SEEDS)
def test_twice_a_flow_is_its_lone_round_trip_without_half_of_the_data_node(problem: PlanningProblem, seed: int) -> None:
    """Up to the rounding of edges."""
    problem = replace(problem, sums=NO_SUMS, transmit=np.zeros_like(problem.link))
    plan = search_flows(problem, seed, SearchBudget(moves=0)).solution
    alone = replace(problem, sizes=(1, *problem.sizes[1:]), microbatches=1)
    for i, cost in enumerate(flow_costs(edge_costs(problem), plan).tolist()):
        one = Solution(plan.stage, plan.origin[i : i + 1], plan.path[i : i + 1])
        half = problem.passes[[0, 2], plan.origin[i]].sum() / 2
        assert abs(2 * cost + half - step_ns(alone, one)) <= 3 * (problem.visits + 1)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.sampled_from(["sum", "two_way"]))
def test_no_plan_is_below_the_least_objective(seed: int, rule: flows.EdgeRule) -> None:
    """All wirings of eight nodes within the nodes' capacities are tried."""
    problem, start = eight(seed)
    edges = edge_costs(problem, rule)
    found = flow_along(problem, start, seed, 400, rule).solution
    routes = np.array(list(product(*(start.members(s) for s in (1, 2, 3)))))
    each = np.stack([flow_costs(edges, start._replace(path=np.tile(route, (4, 1)))) for route in routes])
    uses = np.stack([np.bincount(route, minlength=8) for route in routes])
    choices, most = np.indices((8,) * 4).reshape(4, -1), room(problem, start)
    fits = (sum(uses[chosen] for chosen in choices) <= most).all(axis=1)
    least = np.max([each[chosen, i] for i, chosen in enumerate(choices)], axis=0)[fits].min()
    assert least <= flow_costs(edges, found).max() <= flow_costs(edges, start).max()
    assert (np.bincount(found.path.ravel(), minlength=8) <= most).all() and find_violations(problem, found) == []


def eight(seed: int) -> tuple[PlanningProblem, Solution]:
    """Return two data nodes and three stages of two nodes, with two microbatches each, and random flows."""
    rng = np.random.default_rng(seed)
    forward, backward = rng.integers(1, 50, (2, 3, 8))
    link, late = rng.integers(50, 500, (4, 4)), rng.integers(0, 50, (4, 4))
    problem = small_problem(
        rng.integers(0, 4, 8), (2, 2, 2, 2), link, forward=forward, backward=backward, visits=3, microbatches=2,
        slots=rng.integers(1, 4, 8), latency=late,
    )  # fmt: skip
    return problem, random_flows(problem, [[0, 1], [2, 3], [4, 5], [6, 7]], random.Random(seed))


@pytest.mark.parametrize("moves", [0, 1, 9_999, 10_001, 26.4, 210_000])
def test_the_search_makes_exactly_its_moves(moves: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made, move, (problem, _) = [0], flows.flow_moves, eight(0)

    def counted(net: flows.FlowNetwork, now: flows.Flows, chance: Floats, *others: Any) -> int:
        made.append(len(chance))
        return move(net, now, chance, *others)

    monkeypatch.setattr(flows, "flow_moves", counted)
    found = search_flows(problem, 0, SearchBudget(moves=moves))
    assert found.moves == int(moves) == sum(made) - 1, "one move compiles"


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_a_move_is_judged_by_the_edges_it_changes(seed: int) -> None:
    """With all other edges of other costs, the same moves are accepted."""
    problem, start = eight(seed)
    edges, rng = edge_costs(problem), np.random.default_rng(seed)
    chance = rng.random((1, flows.RANDOMS))

    def moved(edges: Ints, temperature: float) -> Ints:
        load = np.bincount(start.path.ravel(), minlength=problem.nodes)
        now = flows.Flows(start.origin, start.path.copy(), flow_costs(edges, start), load)
        net = flows.network_of(problem, edges, start, load)
        flows.flow_moves(net, now, chance, np.array([temperature]), start.path.copy(), 0)
        return now.path

    proposed, others = moved(edges, 1e30), edges + rng.integers(0, 1000, edges.shape)
    for i in np.flatnonzero((proposed != start.path).any(axis=1)):
        old, new = edges_of(start.origin[i], start.path[i]), edges_of(start.origin[i], proposed[i])
        for edge in old ^ new:
            others[edge] = edges[edge]
    for temperature in (1e-9, 50.0):
        assert moved(edges, temperature).tolist() == moved(others, temperature).tolist()


def edges_of(origin: int, path: Ints) -> set[tuple[int, int, int]]:
    """Return the kind and the nodes of each edge of a flow."""
    walk = [int(origin), *path.tolist(), int(origin)]
    kinds = [0, *[1] * (len(path) - 1), 2]
    return set(zip(kinds, walk, walk[1:], strict=False))


def test_a_time_limit_ends_the_search() -> None:
    assert search_flows(published(), 0, SearchBudget(seconds=0)).moves == 0


def test_the_recipe_chooses_the_search() -> None:
    assert plan_search(RoutingConfig()) is search
    chosen = plan_search(RoutingConfig(search="flows", edge_cost="sum"))
    assert isinstance(chosen, partial) and chosen.func is search_flows and chosen.keywords == {"rule": "sum"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"search": "flow"}, "'anneal' or 'flows'"),
        ({"search": "flows", "edge_cost": "mean"}, "'two_way' or 'sum'"),
        ({"edge_cost": "sum"}, "only routing.search = 'flows' uses it"),
        ({"search": "flows", "sums": True}, "does not plan gradient sums"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RoutingConfig.model_validate(given)


@pytest.mark.slow
def test_planning_by_flows_writes_a_schedule(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    command = ["plan", str(RECIPE), "--budget", "33moves", "--quiet", "--to", str(file), "--routing.search", "flows"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    schedule = read(file)
    assert schedule.search.moves == 26, "a fifth of the moves plans a full pipeline to compare with"
    assert find_violations(schedule.problem, schedule.solution) == []


@pytest.mark.slow
def test_the_last_reported_plan_of_a_search_over_flows_is_the_written_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.json"
    flags = ["--routing.search", "flows", "--routing.edge_cost", "sum", "--routing.swaps", "3"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(RECIPE), "--budget", "60000moves", "--to", str(file), *flags])
    assert ended.value.code == 0
    out = capsys.readouterr()
    reported = re.findall(r"  step (\S+) s, gap", out.out + out.err)
    assert float(reported[-1]) == pytest.approx(read(file).step_s, rel=0.011)
    assert "no effect     routing.swaps = 3: the search over flows plans no steps back" in out.out
