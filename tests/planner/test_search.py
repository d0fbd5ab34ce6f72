"""The search is reproducible, never gets worse, is valid at any time, and finds good plans."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.pipeline.routing.skipping import cc3_violation
from planaria.planner.anneal import obeys_cc3
from planaria.planner.baselines import COLUMNS, PLANNED, RANDOM, ROWS, compare_baselines, random_skipping
from planaria.planner.bound.step_bound import step_lower_bound
from planaria.planner.guidelines import find_violations
from planaria.planner.problem import ROLES, PlanningProblem
from planaria.planner.search import SearchBudget, SearchResult, search, step_ns
from support.planner_instances import CA, full_columns, problems, published, published_plan

MOVES = 150_000


class Reports:
    """Check each best plan that the search reports."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.steps: list[float] = []
        self.moves: list[int] = []

    def __call__(self, found: SearchResult) -> None:
        assert find_violations(self.problem, found.solution) == []
        assert found.step_s == step_ns(self.problem, found.solution) / 1e9
        self.steps.append(found.step_s)
        self.moves.append(found.moves)


@pytest.fixture(scope="module")
def searched() -> tuple[SearchResult, Reports]:
    reports = Reports(published())
    return search(published(), 0, SearchBudget(moves=MOVES), reports), reports


@pytest.mark.slow
def test_the_published_instance_is_planned_well(searched: tuple[SearchResult, Reports]) -> None:
    found, _ = searched
    full = step_ns(published(5), full_columns()) / 1e9
    assert found.step_s / full <= 0.45
    assert found.step_s < step_ns(published(), published_plan(CA)) / 1e9
    assert found.step_s <= 0.8 * random_skipping(published(), found.solution, 0)
    assert step_lower_bound(published(), examinations=9).step_s <= found.step_s


@pytest.mark.slow
def test_reported_plans_are_valid_and_never_get_worse(searched: tuple[SearchResult, Reports]) -> None:
    found, reports = searched
    assert reports.steps == sorted(reports.steps, reverse=True)
    assert reports.steps[-1] == found.step_s < reports.steps[0]
    assert reports.moves[-1] == found.moves == MOVES and reports.moves == sorted({*reports.moves})


def test_the_same_seed_and_moves_find_the_same_plan() -> None:
    first, again, other = (search(published(), seed, SearchBudget(moves=5000)) for seed in (3, 3, 4))
    assert first.step_s == again.step_s
    for a, b in zip(first.solution, again.solution, strict=True):
        assert a.tolist() == b.tolist()
    assert other.solution.routes != first.solution.routes


def test_the_interval_between_clock_checks_does_not_change_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(published(), 1, SearchBudget(moves=4000))
    monkeypatch.setattr("planaria.planner.search.CLOCK_CHECK_S", 0.0)
    parts = search(published(), 1, SearchBudget(moves=4000))
    assert parts.solution.routes == whole.solution.routes and parts.step_s == whole.step_s


@pytest.mark.slow
def test_the_same_moves_find_the_same_plan_without_numba() -> None:
    code = "from test_search import *; print(search(published(), 5, SearchBudget(moves=300)).solution.routes)"
    plain = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert plain.stdout.strip() == str(search(published(), 5, SearchBudget(moves=300)).solution.routes)


def test_a_budget_of_a_fraction_of_a_move_ends_the_search() -> None:
    """`planaria plan` gives the search 0.8 of its moves."""
    assert search(published(), 0, SearchBudget(moves=26.4)).moves == 26


def test_a_time_limit_ends_the_search() -> None:
    assert search(published(), 0, SearchBudget(seconds=0)).moves == 0


@pytest.mark.slow
@settings(max_examples=100)
@given(problems(least=1), st.integers(0, 99))
def test_plans_of_random_problems_are_valid_and_no_better_than_the_bound(problem: PlanningProblem, seed: int) -> None:
    reports = Reports(problem)
    found = search(problem, seed, SearchBudget(moves=2000), reports)
    reports(found)
    assert reports.steps == sorted(reports.steps, reverse=True)
    assert step_lower_bound(problem, examinations=3).step_s <= found.step_s


def test_a_plan_is_found_whichever_stages_are_drawn_first() -> None:
    """Half of eight stages: after a draw of the first four, the last four would be out of reach for the next route."""
    problem = replace(published(4), sizes=(4, *[2] * 8), microbatches=4)
    for seed in range(10):
        assert find_violations(problem, search(problem, seed, SearchBudget(moves=200)).solution) == []


def test_roles_are_respected() -> None:
    """Five distant nodes must be data nodes, five in Europe must not."""
    problem = published()
    must, never = [4, 8, 9, 11, 16], [0, 2, 6, 10, 12]
    problem.role[must], problem.role[never] = ROLES.index("data"), ROLES.index("worker")
    found = search(problem, 0, SearchBudget(moves=20_000))
    assert found.solution.members(0) == must
    assert find_violations(problem, found.solution) == []


def test_skipping_alone_helps_if_all_links_are_equal() -> None:
    """Skipping is much faster than a full pipeline, and random skipping nearly as fast."""
    problem = published()
    alike = replace(problem, link=np.full_like(problem.link, 500_000_000))
    found = search(alike, 0, SearchBudget(moves=30_000))
    assert 0.9 <= found.step_s / random_skipping(alike, found.solution, 0) <= 1
    assert found.step_s <= 0.72 * step_ns(replace(alike, visits=5), full_columns()) / 1e9


def test_baselines_are_no_faster_than_the_plan(searched: tuple[SearchResult, Reports]) -> None:
    found, _ = searched
    compared = compare_baselines(published(), found.solution, 0, SearchBudget(moves=10_000))
    assert list(compared) == [ROWS, COLUMNS, RANDOM, PLANNED]
    assert found.step_s < min(compared.values())
    assert compared[PLANNED] < compared[ROWS]


@pytest.mark.parametrize("jump", [1, 2, 4])
@pytest.mark.parametrize("swaps", [0, 1, 2])
def test_the_compiled_order_rule_matches_the_plain_one(swaps: int, jump: int) -> None:
    """All routes through up to four of five stages; node n is of stage n, and nodes 6 and 7 of stages 1 and 2."""
    stage = np.array([0, 1, 2, 3, 4, 5, 1, 2])
    verdicts = set()
    for visits in range(1, 5):
        for path in permutations(range(1, 8), visits):
            walk = np.array(path)
            reason = cc3_violation(stage[walk].tolist(), swaps, jump)
            assert obeys_cc3(stage, walk, swaps, jump) == (reason == ""), reason
            verdicts.add(reason == "")
    assert verdicts == {True, False}
