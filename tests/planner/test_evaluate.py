"""The compiled step equals the object-based clock. The published routes take the published times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.pipeline.plan.actions import Key
from planaria.pipeline.plan.build import simulate_first_come
from planaria.planner.baselines import route_along_columns, route_along_rows
from planaria.planner.makespan import NEVER, makespan
from planaria.planner.problem import PlanningProblem, Solution
from support.planner_instances import (
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
    small_problem,
)

NARROW = replace(published(2), slots=np.ones(20, np.int64))
"""One slot at each node."""
CROSSING = Solution(np.array([0, 0, 1, 2] + [3] * 16), np.array([0, 1]), np.array([[2, 3], [3, 2]]))
"""Two microbatches that visit the same two nodes in opposite orders."""


def compare(problem: PlanningProblem, plan: Solution) -> int:
    """Run both clocks, compare every microbatch's finish, and return the step."""
    done, over = np.zeros(len(plan.origin), np.int64), np.zeros(problem.nodes, np.int64)
    step = makespan(problem.tables, plan.origin, plan.path, done, over)
    try:
        clock = simulate_first_come(plan.routes, problem.memory, problem.prices)
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


@pytest.mark.parametrize("draw", [random_plan, any_plan])
@settings(max_examples=200)
@given(problem=problems(), seed=st.integers(0, 2**32))
@example(problem=NARROW, seed=0)
def test_plans_take_equally_long_or_deadlock_on_both_clocks(
    draw: Callable[[PlanningProblem, int], Solution], problem: PlanningProblem, seed: int
) -> None:
    compare(problem, draw(problem, seed))


def test_microbatches_that_need_each_other_s_slots_deadlock() -> None:
    assert compare(NARROW, CROSSING) == NEVER
    assert compare(replace(NARROW, slots=np.full(20, 2)), CROSSING) < NEVER


def two_passes(sites: tuple[str, ...], transmit: int) -> int:
    """Return the step of two microbatches started at 1 and 2, with free passes and messages of 20."""
    link = np.array([[20]] if len(sites) == 1 else [[0, 20], [20, 0]])
    problem = small_problem(
        [0, len(sites) - 1],
        (1, 1),
        link,
        microbatches=2,
        forward=np.array([[1, 0], [0, 0], [0, 0]]),
        backward=np.zeros((3, 2), np.int64),
        transmit=np.full_like(link, transmit),
    )
    return compare(problem, Solution(np.array([0, 1]), np.array([0, 0]), np.array([[1], [1]])))


@pytest.mark.parametrize("sites", [("here", "there"), ("here",)])
def test_messages_queue_for_a_link(sites: tuple[str, ...]) -> None:
    """At one site as between two. Activations out and home and gradients out and home take 4 · 20."""
    assert two_passes(sites, transmit=0) == 2 + 80
    # The second starts at 1 + 10, not at 2, and never queues again.
    assert two_passes(sites, transmit=10) == 11 + 80


@pytest.mark.parametrize("direction", [(0, 1), (1, 0)])
def test_a_link_may_be_slower_in_one_direction(direction: tuple[int, int]) -> None:
    problem = published()
    link = problem.link.copy()
    link[problem.site[direction[0]], problem.site[direction[1]]] += 1_000_000_000
    compare(replace(problem, link=link), random_plan(problem, 0))


PUBLISHED = {
    "random skipping": (3, published_plan(SKIP), 48.2),
    "no TC2": (3, published_plan(NO_TC2), 35.1),
    "SkipPipe": (3, published_plan(CA), 32.9),
    "full, all data nodes": (5, full_columns(), 82.8),
    "full, three rows": (5, full_rows(10), 105.3),
    "full, three rows, nine each": (5, full_rows(9), 79.95),
}
"""Visits, plan, and the published time, or the time measured from published routes, in seconds."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_routes_take_their_published_time_on_both_clocks(name: str) -> None:
    visits, plan, seconds = PUBLISHED[name]
    assert compare(published(visits), plan) / 1e9 == pytest.approx(seconds, rel=0.01)


def test_baselines_on_the_published_rows_are_the_published_full_pipelines() -> None:
    problem, plan = published(5), published_plan(CA)
    rows = [[stage[row] for stage in STAGES] for row in range(3)]
    for made, theirs in (
        (route_along_rows(problem, plan, rows), full_rows(10)),
        (route_along_columns(problem, plan, rows), full_columns()),
    ):
        assert made.routes == theirs.routes
