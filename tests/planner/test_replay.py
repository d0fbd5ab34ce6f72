"""The published routes take the published times."""

from __future__ import annotations

import numpy as np
import pytest
from instances import CA, NO_TC2, SKIP, STAGES, full_columns, full_rows, published, published_plan

from planaria.pipeline.plan.planned import first_come
from planaria.planner.baselines import along_columns, along_rows
from planaria.planner.evaluate import makespan
from planaria.planner.problem import Problem, Solution

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
