"""Large networks: parts planned separately are a valid plan of the whole, whose step is that of its slowest part."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.planner.cells import cell_problem, divide_into_cells, independent_groups, search_by_cells
from planaria.planner.guidelines import find_violations
from planaria.planner.problem import ROLES, PlanningProblem, Solution
from planaria.planner.search import SearchBudget, search, step_ns
from planaria.planner.tables import NO_SUMS
from support.planner_instances import problems, published, random_plan, small_problem


def many(nodes: int, sites: int, data: int, stages: int, visits: int, seed: int = 0) -> PlanningProblem:
    """Return equal nodes at sites in a line, neighbours 0.2 s apart; messages within a site take 0.05 s."""
    rng = np.random.default_rng(seed)
    far = np.abs(np.arange(sites)[:, None] - np.arange(sites))
    workers = nodes - data
    return small_problem(
        rng.permutation(np.arange(nodes) % sites),
        (data, *(workers // stages + (s < workers % stages) for s in range(stages))),
        (50 + 200 * far) * 10**6,
        microbatches=4,
        visits=visits,
        swaps=2,
        jump=4,
        forward=np.array([[400], [400], [100]]) * np.full(nodes, 10**6),
        backward=np.array([[600], [600], [0]]) * np.full(nodes, 10**6),
    )


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(3, 6), st.sampled_from([2, 3]))
def test_cells_obey_every_rule(seed: int, sites: int, stages: int, visits: int) -> None:
    problem = many(70, sites, 14, stages, visits, seed)
    begun = divide_into_cells(problem, random.Random(seed))
    assert begun is not None
    solution, cells = begun
    assert find_violations(problem, solution) == []
    assert sorted(node for nodes in cells for node in nodes) == list(range(70)) and len(cells) > 1
    for nodes in cells:  # no microbatch leaves its cell
        inside = np.isin(solution.origin, nodes)
        assert np.isin(solution.path[inside], nodes).all() and not np.isin(solution.path[~inside], nodes).any()


def test_given_data_nodes_keep_their_role() -> None:
    problem = many(60, 4, 12, 3, 2)
    role = np.full(60, ROLES.index("worker"))
    role[::5] = ROLES.index("data")
    begun = divide_into_cells(replace(problem, role=role), random.Random(0))
    assert begun is not None
    assert begun[0].members(0) == list(range(0, 60, 5))
    assert find_violations(replace(problem, role=role), begun[0]) == []


def test_a_small_network_has_no_cells() -> None:
    assert divide_into_cells(many(8, 2, 1, 5, 3), random.Random(0)) is None


@settings(max_examples=60)
@given(problems(least=1), st.integers(0, 2**32))
def test_a_step_takes_as_long_as_its_slowest_part(problem: PlanningProblem, seed: int) -> None:
    problem = replace(problem, sums=NO_SUMS)  # sums span all parts
    solution = random_plan(problem, seed)
    whole = cell_problem(problem, solution, range(problem.nodes))
    groups = independent_groups(whole)
    parts = [cell_problem(problem, solution, nodes) for nodes in groups]
    assert sorted(node for nodes in groups for node in nodes) == list(range(problem.nodes))
    assert max(step_ns(own.problem, own.solution) for own in parts) == step_ns(problem, solution)


def test_a_part_is_put_back_in_its_place() -> None:
    problem = many(40, 4, 8, 3, 2)
    begun = divide_into_cells(problem, random.Random(1))
    assert begun is not None
    solution, cells = begun
    before = solution.copy()
    own = cell_problem(problem, solution, cells[0])
    own.write_into(solution, own.solution)
    assert all((a == b).all() for a, b in zip(solution, before, strict=True))
    own.write_into(solution, own.solution._replace(path=own.solution.path[::-1]))
    assert (solution.path[own.rows] == before.path[own.rows][::-1]).all()
    others = np.setdiff1d(np.arange(problem.count), own.rows)
    assert (solution.path[others] == before.path[others]).all()


@pytest.mark.slow
def test_plans_never_get_worse_and_near_cells_help_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(many(60, 5, 12, 4, 3), microbatches=6)

    def unmoved(
        cell_problem: PlanningProblem, own: Solution, moves: int, rng: np.random.Generator
    ) -> tuple[Solution, int]:
        return own.copy(), step_ns(cell_problem, own)

    plans = search_by_cells(problem, random.Random(0), np.random.default_rng(0), unmoved)
    assert plans is not None
    steps = [step_ns(problem, next(plans)) for _ in range(20)]
    assert len(set(steps)) == 1  # without annealing nothing changes
    monkeypatch.setattr("planaria.planner.cells.MOVES", 5000)
    reported: list[float] = []
    found = search(problem, 0, SearchBudget(moves=150_000), lambda now: reported.append(now.step_s))
    assert reported == sorted(reported, reverse=True)
    assert find_violations(problem, found.solution) == []
    assert found.step_s < steps[0] / 1e9


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_finds_the_same_cells(seed: int) -> None:
    problem = many(60, 5, 12, 3, 2)
    first, again = (search(problem, seed, SearchBudget(moves=20_000)) for _ in range(2))
    assert first.solution.routes == again.solution.routes and first.moves == again.moves == 20_000


def test_a_network_whose_stages_are_out_of_reach_is_searched_as_a_whole() -> None:
    """Jumps of one place skip no stage, so no cell can use its stages in another proportion."""
    problem = replace(many(60, 5, 12, 3, 3), jump=1)
    assert find_violations(problem, search(problem, 0, SearchBudget(moves=2000)).solution) == []
    assert published().nodes < 60


class Clock:
    """Replacement for the planner's time module: each move of ``anneal`` takes ``move_s`` seconds."""

    def __init__(self, move_s: float) -> None:
        self.now, self.move_s = 0.0, move_s

    def monotonic(self) -> float:
        return self.now

    def anneal(self, tables: object, *rest: object) -> int:
        temperature, best = rest[4], rest[8]
        assert isinstance(temperature, np.ndarray) and isinstance(best, int)
        self.now += self.move_s * len(temperature)
        return best


@pytest.mark.parametrize("move_s", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("problem", [published(), many(80, 4, 16, 4, 3)], ids=["whole", "by cells"])
def test_a_search_keeps_its_budget_however_slow_a_move_is(
    monkeypatch: pytest.MonkeyPatch, problem: PlanningProblem, move_s: float
) -> None:
    """Without numba a move takes a thousand times as long."""
    clock = Clock(move_s)
    monkeypatch.setattr("planaria.planner.search.time", clock)
    monkeypatch.setattr("planaria.planner.search.anneal", clock.anneal)
    search(problem, 0, SearchBudget(seconds=5.0))
    assert 5.0 <= clock.now <= 5.5
