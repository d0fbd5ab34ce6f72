"""Valid plans pass the guidelines, and every violation is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planaria.planner.guidelines import PlannedPasses, Violation, find_violations, planned_passes
from planaria.planner.makespan import NEVER
from planaria.planner.problem import ROLES, PlanningProblem, Solution
from planaria.planner.search import step_ns
from support.planner_instances import CA, NO_TC2, SKIP, Paths, problems, published, published_plan, random_plan

PROBLEM, PLAN = published(), published_plan(CA)
"""Microbatch 0 starts at node 0 and visits 14, 6 and 12, of stages 1, 2 and 3."""
PASSES = planned_passes(PROBLEM, PLAN)


def along(*walk: int, microbatch: int = 0) -> Solution:
    """Return the plan with other nodes on the route of one microbatch."""
    plan = PLAN.copy()
    plan.path[microbatch] = walk
    return plan


def at_node(node: int) -> Solution:
    """Return the plan with microbatch 0 started at another node."""
    plan = PLAN.copy()
    plan.origin[0] = node
    return plan


def timed(part: str, microbatch: int, number: int, change: int) -> PlannedPasses:
    """Return the planned times with one pass starting or ending ``change`` nanoseconds later."""
    passes = PlannedPasses(PASSES.starts.copy(), PASSES.ends.copy())
    getattr(passes, part)[microbatch, number] += change
    return passes


def with_slots(node: int, slots: int) -> PlanningProblem:
    changed = PROBLEM.slots.copy()
    changed[node] = slots
    return replace(PROBLEM, slots=changed)


def with_role(node: int, role: str) -> PlanningProblem:
    changed = PROBLEM.role.copy()
    changed[node] = ROLES.index(role)
    return replace(PROBLEM, role=changed)


@pytest.mark.parametrize("paths", [CA, NO_TC2, SKIP])
def test_published_plans_are_valid(paths: Paths) -> None:
    assert find_violations(PROBLEM, published_plan(paths)) == []


@pytest.mark.slow
@settings(max_examples=100)
@given(problems(), st.integers(0, 2**32))
def test_random_plans_are_valid_unless_they_deadlock(problem: PlanningProblem, seed: int) -> None:
    plan = random_plan(problem, seed)
    assume(step_ns(problem, plan) < NEVER)
    assert find_violations(problem, plan) == []


@pytest.mark.parametrize(
    ("plan", "violation"),
    [
        (at_node(9), Violation("CC1", "microbatch 0 starts at node 9, of stage 2")),
        (at_node(9), Violation("CC1", "data node 0 starts 5 microbatches, not 6")),
        (at_node(3), Violation("CC1", "data node 3 starts 7 microbatches, not 6")),
        (along(14, 3, 12), Violation("CC1", "microbatch 0 visits data node 3 on its route")),
        (along(14, 6, 0), Violation("CC1", "microbatch 0 visits data node 0 on its route")),
        (along(14, 6, 9), Violation("CC3", "microbatch 0 visits stage 2 twice")),
        (along(14, 14, 12), Violation("CC3", "microbatch 0 visits stage 1 twice")),
        (along(14, 6, 5), Violation("CC2", "stage 4 is visited 19 times, stage 3 17 times")),
    ],
)
def test_routes_that_violate_a_rule(plan: Solution, violation: Violation) -> None:
    assert violation in find_violations(PROBLEM, plan)


@pytest.mark.parametrize(
    ("problem", "plan", "where"),
    [
        (PROBLEM, along(12, 14, 6), "microbatch 0 goes back from stage 3 to stage 1, more than one place"),
        (PROBLEM, along(17, 15, 5, microbatch=1), "microbatch 1 jumps from stage 0 to stage 5, more than 4 places"),
        (replace(PROBLEM, jump=3), PLAN, "microbatch 1 jumps from stage 1 to stage 5, more than 3 places"),
        (replace(PROBLEM, swaps=0), PLAN, "microbatch 1 goes back 1 times, more than 0"),
    ],
)
def test_stages_out_of_order_violate_only_cc3(problem: PlanningProblem, plan: Solution, where: str) -> None:
    violations = find_violations(problem, plan)
    assert violations[0] == Violation("CC3", where)
    assert {violation.rule for violation in violations} == {"CC3"}


def test_a_node_that_holds_more_than_its_slots_violates_tc1() -> None:
    assert find_violations(PROBLEM, PLAN, PASSES) == []
    for node in (0, 14):
        assert find_violations(with_slots(node, 2), PLAN, PASSES) == [
            Violation("TC1", f"node {node} holds 3 microbatches at the same time and has 2 slots")
        ]


def test_two_passes_at_once_on_one_node_violate_tc2() -> None:
    """Microbatches 0 and 5 are the first two of data node 0, and neither waits for input."""
    assert PASSES.starts[5, 0] == PASSES.ends[0, 0]
    for passes in (timed("starts", 5, 0, -1), timed("ends", 0, 0, 1)):
        assert Violation("TC2", "node 0 works on microbatches 0 and 5 at the same time") in find_violations(
            PROBLEM, PLAN, passes
        )
    assert find_violations(PROBLEM, PLAN, timed("starts", 5, 0, -1)) == [
        Violation("TC2", "node 0 works on microbatches 0 and 5 at the same time")
    ]


@pytest.mark.parametrize(("number", "node"), [(1, 14), (4, 0), (6, 12), (9, 0)])
def test_a_pass_before_its_input_violates_order(number: int, node: int) -> None:
    """A hop out, the loss, the first hop back and the last."""
    early = int(PASSES.ends[0, number - 1]) - int(PASSES.starts[0, number])
    passes = timed("starts", 0, number, early)
    where = f"microbatch 0, pass {number} at node {node}, begins before its input arrives"
    assert Violation("order", where) in find_violations(PROBLEM, PLAN, passes)


def test_a_message_one_nanosecond_late_violates_order() -> None:
    where = "microbatch 0, pass 1 at node 14, begins before its input arrives"
    assert find_violations(PROBLEM, PLAN, timed("starts", 0, 1, -1)) == [Violation("order", where)]


@pytest.mark.parametrize(
    ("problem", "where"),
    [
        (with_role(14, "data"), "node 14 (Germany 2) is a data node at stage 1"),
        (with_role(3, "worker"), "node 3 (Iowa 1) is a worker node at stage 0"),
        (replace(PROBLEM, sizes=(5, 4, 2, 3, 3, 3)), "stage 1 has 3 nodes, not 4"),
    ],
)
def test_nodes_in_forbidden_stages_are_named(problem: PlanningProblem, where: str) -> None:
    assert Violation("arrangement", where) in find_violations(problem, PLAN)


def test_a_plan_that_deadlocks_violates_tc1() -> None:
    """Two microbatches, one slot at each node, and the same two nodes in opposite orders."""
    problem = replace(published(2), slots=np.ones(20, np.int64), sizes=(2, 9, 9), microbatches=1)
    plan = Solution(np.array([0, 0, *[1, 2] * 9]), np.array([0, 1]), np.array([[2, 3], [3, 2]]))
    [violation] = find_violations(problem, plan)
    assert violation.rule == "TC1"
    assert "memory deadlocks: the forward of microbatch 1 at node 2 waits" in violation.where
