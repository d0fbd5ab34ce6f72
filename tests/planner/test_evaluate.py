"""The compiled step and the clock of objects are one clock. The published routes take the published times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from instances import (
    CA,
    NO_TC2,
    SKIP,
    STAGES,
    any_plan,
    full_columns,
    full_rows,
    problems,
    published,
    published_plan,
    random_plan,
)

from planaria.common.errors import UserError
from planaria.pipeline.plan.actions import Key
from planaria.pipeline.plan.build import first_come
from planaria.planner.baselines import along_columns, along_rows
from planaria.planner.evaluate import NEVER, makespan
from planaria.planner.problem import Problem, Solution

NARROW = replace(published(2), slots=np.ones(20, np.int64))
"""one slot at each node"""
CROSSING = Solution(np.array([0, 0, 1, 2] + [3] * 16), np.array([0, 1]), np.array([[2, 3], [3, 2]]))
"""two microbatches that meet the same two nodes in opposite orders"""


def compare(problem: Problem, plan: Solution) -> int:
    """Runs both clocks, holds every microbatch's end against the other's, and returns the step."""
    done, over = np.zeros(len(plan.origin), np.int64), np.zeros(problem.nodes, np.int64)
    step = makespan(problem.tables, plan.origin, plan.path, done, over)
    try:
        clock = first_come(plan.routes, problem.memory, problem.prices)
    except UserError as error:
        assert "memory deadlocks" in str(error)
        assert step == NEVER
        return step
    assert step == clock.now
    last = {node: max((clock.ends[n] for n in ran), default=0) for node, ran in clock.ran.items()}
    assert over.tolist() == [last.get(node, 0) for node in range(problem.nodes)]
    through = {action.key: end for action, end in zip(clock.graph.actions, clock.ends, strict=True)}
    assert done.tolist() == [through[Key("backward", i, 0)] for i in range(len(plan.origin))]
    return step


@settings(max_examples=200)
@given(problems(), st.integers(0, 2**32))
def test_random_routes_take_equally_long_on_both_clocks(problem: Problem, seed: int) -> None:
    compare(problem, random_plan(problem, seed))


@settings(max_examples=200)
@given(problems(), st.integers(0, 2**32))
@example(NARROW, 0)
def test_routes_without_rules_take_equally_long_or_deadlock_on_both_clocks(problem: Problem, seed: int) -> None:
    compare(problem, any_plan(problem, seed))


def test_a_node_for_which_each_waits_at_the_other_is_a_deadlock() -> None:
    assert compare(NARROW, CROSSING) == NEVER
    assert compare(replace(NARROW, slots=np.full(20, 2)), CROSSING) < NEVER


def two_passes(sites: tuple[str, ...], transmit: int) -> int:
    """Two microbatches let in at 1 and 2, worked on in no time, and messages of 20, ``transmit`` of it on the link."""
    one = len(sites) == 1
    problem = Problem(
        names=("data", "worker"), sites=sites, site=np.array([0, 0 if one else 1]), sizes=(1, 1), microbatches=2,
        visits=1, swaps=0, jump=1, forward=np.array([[1, 0], [0, 0], [0, 0]]), backward=np.zeros((3, 2), np.int64),
        link=np.array([[20]] if one else [[0, 20], [20, 0]]), transmit=np.full((len(sites), len(sites)), transmit),
        slots=np.array([2, 2]), role=np.zeros(2, np.int64),
    )  # fmt: skip
    return compare(problem, Solution(np.array([0, 1]), np.array([0, 0]), np.array([[1], [1]])))


@pytest.mark.parametrize("sites", [("here", "there"), ("here",)])
def test_messages_that_meet_on_a_link_wait_for_one_another(sites: tuple[str, ...]) -> None:
    """At one site as between two. Out and home with the activation, out and home with the gradient is 4 · 20."""
    assert two_passes(sites, transmit=0) == 2 + 80
    # The second sets out at 1 + 10, not at 2, and meets nobody again.
    assert two_passes(sites, transmit=10) == 11 + 80


@pytest.mark.parametrize("asked", [(0, 1), (1, 0)])
def test_a_link_may_be_slower_in_one_direction(asked: tuple[int, int]) -> None:
    problem = published()
    link = problem.link.copy()
    link[problem.site[asked[0]], problem.site[asked[1]]] += 1_000_000_000
    compare(replace(problem, link=link), random_plan(problem, 0))


PUBLISHED = {
    "random skipping": (3, published_plan(SKIP), 48.2),
    "no TC2": (3, published_plan(NO_TC2), 35.1),
    "SkipPipe": (3, published_plan(CA), 32.9),
    "full, all data nodes": (5, full_columns(), 82.8),
    "full, three rows": (5, full_rows(10), 105.3),
    "full, three rows, nine each": (5, full_rows(9), 79.95),
}
"""visits, plan, and the time that was published or measured from what was published, in seconds"""


def step_s(problem: Problem, plan: Solution) -> float:
    done, over = np.zeros(len(plan.origin), np.int64), np.zeros(problem.nodes, np.int64)
    return makespan(problem.tables, plan.origin, plan.path, done, over) / 1e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_routes_take_their_published_time_on_both_clocks(name: str) -> None:
    visits, plan, seconds = PUBLISHED[name]
    problem = published(visits)
    assert step_s(problem, plan) == pytest.approx(seconds, rel=0.01)
    assert step_s(problem, plan) == first_come(plan.routes, problem.memory, problem.prices).now / 1e9


def test_the_gains_are_the_published_ones() -> None:
    planned, skipped = (step_s(published(), published_plan(paths)) for paths in (CA, SKIP))
    assert planned / step_s(published(5), full_columns()) == pytest.approx(0.40, abs=0.01)
    assert planned / skipped == pytest.approx(0.68, abs=0.01)


def test_baselines_on_the_published_rows_are_the_published_full_pipelines() -> None:
    problem, plan = published(5), published_plan(CA)
    rows = [[stage[row] for stage in STAGES] for row in range(3)]
    for made, theirs in (
        (along_rows(problem, plan, rows), full_rows(10)),
        (along_columns(problem, plan, rows), full_columns()),
    ):
        assert made.routes == theirs.routes
