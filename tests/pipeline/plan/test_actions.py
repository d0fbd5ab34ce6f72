from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from planaria.common.errors import UserError
from planaria.pipeline.plan.actions import Key, StepPlan, topological_order
from planaria.pipeline.plan.build import plan_routes
from support.random_plans import plans


def most_alive(plan: StepPlan) -> int:
    """Return the maximum number of microbatches between embedding and last action in the plan's order."""
    order = topological_order(plan)
    left = {i: sum(a.microbatch == i for a in order) for i in range(len(plan.routes))}
    alive: set[int] = set()
    most = 0
    for action in order:
        alive.add(action.microbatch)
        most = max(most, len(alive))
        left[action.microbatch] -= 1
        if not left[action.microbatch]:
            alive.discard(action.microbatch)
    return most


@given(plans())
def test_every_action_follows_its_dependencies_once(plan: StepPlan) -> None:
    done: set[Key] = set()
    for action in topological_order(plan):
        assert action.input_key is None or action.input_key in done
        assert done.issuperset(action.after)
        assert action.key not in done
        done.add(action.key)
    assert done == {action.key for actions in plan.actions.values() for action in actions}


@given(plans())
def test_memory_stays_within_the_plan(plan: StepPlan) -> None:
    eager = tuple(sorted(plan.actions[0], key=lambda action: action.hop > 0))
    assert most_alive(plan) <= plan.slots[0]
    assert most_alive(replace(plan, actions=plan.actions | {0: eager})) <= plan.slots[0]


def test_a_stage_takes_the_first_ready_action_of_its_list() -> None:
    """The order of the list counts, not the number of the microbatch."""
    plan = plan_routes([(0, 1, 0)] * 2, "gpipe", 2)
    swapped = replace(plan, actions=plan.actions | {0: tuple(sorted(plan.actions[0], key=lambda a: -a.microbatch))})
    entries = [a.microbatch for a in topological_order(swapped) if a.kind == "forward" and a.hop == 0]
    assert entries == [1, 0]


def test_a_cycle_is_refused_with_its_actions() -> None:
    plan = plan_routes([(0, 1, 2, 0)], "1f1b", 1)
    forward, *rest = sorted(plan.actions[1], key=lambda a: a.kind != "forward")
    waiting = replace(forward, after=(Key("backward", 0, 1),))
    f, b = r"F0\.1←0→2( at stage 1)?", r"B0\.1←2→0( at stage 1)?"
    with pytest.raises(UserError, match=f"({f} waits for {b} waits for {f})|({b} waits for {f} waits for {b})"):
        topological_order(replace(plan, actions=plan.actions | {1: (waiting, *rest)}))


def test_a_long_cycle_and_a_duplicate_are_refused() -> None:
    plan = plan_routes([(0, 1, 2, 3, 4, 5, 6, 1, 0)], "1f1b", 1)
    early, *rest = sorted(plan.actions[1], key=lambda a: (a.kind != "forward", a.hop))
    waiting = replace(early, after=(Key("forward", 0, 7),))
    with pytest.raises(
        UserError, match=r"17 of its actions can never start: (F0\.\d←\d→\d at stage \d waits for ){5}…$"
    ):
        topological_order(replace(plan, actions=plan.actions | {1: (waiting, *rest)}))
    with pytest.raises(UserError, match=r"the plan holds F0\.1←0→2 at stage 1 twice"):
        topological_order(replace(plan, actions=plan.actions | {1: (early, early, *rest)}))
