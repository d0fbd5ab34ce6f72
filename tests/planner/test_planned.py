"""Planned task lists: the result of the first-come clock, as a plan that is safe at any other speed."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.pipeline.network.costs import MessageCosts
from planaria.pipeline.plan.actions import StepPlan
from planaria.pipeline.plan.build import compile_plan, simulate_first_come
from planaria.pipeline.plan.check import check
from planaria.pipeline.plan.simulation import PlanSimulation
from planaria.planner.makespan import NEVER
from planaria.planner.problem import PlanningProblem, Solution
from planaria.planner.search import step_ns
from support.planner_instances import CA, NO_TC2, any_plan, problems, published, published_plan

SEEDS = st.integers(0, 2**32)


class Slowed(MessageCosts):
    """``prices`` with every pass and message slowed up to four times, differently on each call."""

    def __init__(self, prices: MessageCosts, seed: int) -> None:
        chance = random.Random(seed)
        self.compute = lambda kind, node, hop: round(prices.compute(kind, node, hop) * chance.uniform(1, 4))
        self.shadow = prices.shadow
        self.transmit = lambda a, b, kind: round(prices.transmit(a, b, kind) * chance.uniform(1, 4))
        self.carry = lambda a, b, kind: round(prices.carry(a, b, kind) * chance.uniform(1, 4))


def most_held(clock: PlanSimulation) -> dict[int, int]:
    """Return by node the most microbatches between the start of a forward and the end of its backward."""
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for action, start, end in zip(clock.graph.actions, clock.starts, clock.ends, strict=True):
        if not action.returns:
            changes[action.node].append((start, 1) if action.kind == "forward" else (end, -1))
    most = {}
    for node, moments in changes.items():
        held, most[node] = 0, 0
        for _, change in sorted(moments):
            held += change
            most[node] = max(most[node], held)
    return most


def plan_of(problem: PlanningProblem, solution: Solution) -> StepPlan:
    return compile_plan(solution.routes, problem.memory, problem.prices)


@settings(max_examples=200)
@given(problems(), SEEDS)
def test_a_planned_plan_is_valid_and_repeats_its_clock(problem: PlanningProblem, seed: int) -> None:
    solution = any_plan(problem, seed)
    assume(step_ns(problem, solution) < NEVER)
    plan = plan_of(problem, solution)
    assert check(plan) == []
    first = simulate_first_come(solution.routes, problem.memory, problem.prices)
    clock = PlanSimulation(plan, problem.prices)
    assert clock.run() == first.now
    times = {a.key: (s, e) for a, s, e in zip(first.graph.actions, first.starts, first.ends, strict=True)}
    assert {a.key: (s, e) for a, s, e in zip(clock.graph.actions, clock.starts, clock.ends, strict=True)} == times


@settings(max_examples=200)
@given(problems(least=1), SEEDS, SEEDS)
def test_at_any_other_speed_it_finishes_within_its_memory(problem: PlanningProblem, seed: int, speed: int) -> None:
    solution = any_plan(problem, seed)
    assume(step_ns(problem, solution) < NEVER)
    clock = PlanSimulation(plan_of(problem, solution), Slowed(problem.prices, speed))
    assert clock.run() > 0
    assert all(held <= problem.slots[node] for node, held in most_held(clock).items())


@pytest.mark.parametrize("speed", range(5))
def test_published_plans_stay_within_memory_at_any_other_speed(speed: int) -> None:
    problem = published()
    for paths in (CA, NO_TC2):
        plan = plan_of(problem, published_plan(paths))
        assert check(plan) == []
        clock = PlanSimulation(plan, Slowed(problem.prices, speed))
        clock.run()
        assert max(most_held(clock).values()) == 3


def test_a_node_without_a_slot_limit_holds_any_number() -> None:
    problem, routes = published(), published_plan(CA).routes
    free = simulate_first_come(routes, {}, problem.prices)
    assert max(most_held(free).values()) == 6
    assert check(compile_plan(routes, {}, problem.prices)) == []
    some = simulate_first_come(routes, {0: 1}, problem.prices)
    assert most_held(some)[0] == 1
    assert free.now < some.now


class Near(MessageCosts):
    """Forwards of 10 at node 1 and no other passes; messages take 3, 2 and 1 to and from nodes 0, 2 and 3."""

    def __init__(self) -> None:
        self.compute = lambda kind, node, hop: 10 if (kind, node) == ("forward", 1) else 0
        self.shadow = lambda kind, node, hop: 0
        self.transmit = lambda a, b, kind: 0
        self.carry = lambda a, b, kind: {0: 3, 2: 2, 3: 1}[a + b - 1]


def test_backwards_precede_forwards_and_forwards_run_in_order_of_arrival() -> None:
    """They arrive at 3, 2 and 1; the first backward arrives at 13, long after the last forward."""
    clock = simulate_first_come([(0, 1, 0), (2, 1, 2), (3, 1, 3)], dict.fromkeys(range(4), 3), Near())
    ran = [clock.graph.actions[n] for n in clock.ran[1]]
    assert [f"{action.kind} {action.microbatch}" for action in ran] == [
        "forward 2", "forward 1", "backward 2", "forward 0", "backward 1", "backward 0",
    ]  # fmt: skip


def test_routes_that_need_too_many_slots_report_the_deadlock() -> None:
    problem = published(2)
    with pytest.raises(UserError, match=r"memory deadlocks: the forward of microbatch 1 at node 1 waits for a slot"):
        compile_plan([(0, 1, 2, 0), (0, 2, 1, 0)], {0: 2, 1: 1, 2: 1}, problem.prices)
