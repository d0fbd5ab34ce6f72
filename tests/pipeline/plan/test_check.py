from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.pipeline.plan.actions import Action, Key, StepPlan
from planaria.pipeline.plan.build import plan_routes
from planaria.pipeline.plan.check import check, require
from support.random_plans import plans

PLAN = plan_routes([(0, 1, 2, 3, 0), (0, 2, 1, 3, 0), (0, 1, 3, 0)], "1f1b", 2)


def changed(plan: StepPlan, key: Key, change: Callable[[Action], tuple[Action, ...]]) -> StepPlan:
    """Return ``plan`` with the actions named ``key`` replaced by ``change`` of each."""
    return replace(
        plan,
        actions={
            stage: tuple(new for a in actions for new in (change(a) if a.key == key else (a,)))
            for stage, actions in plan.actions.items()
        },
    )


def rerouted(*routes: tuple[int, ...]) -> StepPlan:
    return replace(PLAN, routes=routes)


@given(plans())
def test_built_plans_are_valid(plan: StepPlan) -> None:
    assert check(plan) == []
    require(plan)


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (rerouted(), "no microbatches"),
        (replace(PLAN, slots={0: 0}), "node 0 has slots for 0 microbatches"),
        (rerouted((0, 1, 2, 3, 0), (0, 0)), "microbatch 1 visits no block stage"),
        (rerouted((0, 1, 2, 3, 0), (1, 2, 0)), "microbatch 1 goes from node 1 to node 0"),
        (rerouted((0, 1, 2, 3)), "microbatch 0 goes from node 0 to node 3"),
        (rerouted((0, 1, 0, 3, 0)), "microbatch 0 visits node 0 at hop 2"),
        (rerouted((0, 1, 1, 3, 0)), "microbatch 0 visits node 1 twice in a row, at hops 1 and 2"),
        (rerouted((0, 1, 2, 9, 0)), "microbatch 0 visits node 9 at hop 3"),
        (rerouted((0, 1, -2, 3, 0)), "microbatch 0 visits node -2 at hop 2"),
    ],
)
def test_invalid_routes_are_reported(plan: StepPlan, complaint: str) -> None:
    assert any(complaint in problem for problem in check(plan))


KEYS = sorted(a.key for actions in PLAN.actions.values() for a in actions)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_missing_duplicate_or_misplaced_action_is_reported(key: Key) -> None:
    assert any("missing" in problem for problem in check(changed(PLAN, key, lambda a: ())))
    assert any("appears 2 times" in problem for problem in check(changed(PLAN, key, lambda a: (a, a))))
    moved = check(changed(PLAN, key, lambda a: (replace(a, node=1 if a.node == 2 else 2),)))
    assert [f"the {key.kind} of microbatch {key.microbatch}" in problem for problem in moved] == [True]
    off = check(changed(PLAN, key, lambda a: (replace(a, hop=a.hop + 9),)))
    assert any("is not on the route" in problem for problem in off)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_wrong_neighbour_is_reported(key: Key) -> None:
    wrong_source = check(changed(PLAN, key, lambda a: (replace(a, source=None if a.source is not None else 1),)))
    wrong_target = check(changed(PLAN, key, lambda a: (replace(a, target=None if a.target is not None else 1),)))
    where = f"microbatch {key.microbatch} at stage {PLAN.routes[key.microbatch][key.hop]}, hop {key.hop}"
    assert [where in p and "takes its input from" in p for p in wrong_source] == [True]
    assert [where in p and "sends its output to" in p for p in wrong_target] == [True]


@pytest.mark.parametrize(
    ("key", "dropped"),
    [(a.key, key) for actions in PLAN.actions.values() for a in actions for key in a.after],
    ids=str,
)
def test_a_missing_wait_is_reported(key: Key, dropped: Key) -> None:
    """Every edge of a built plan protects memory, the order of a sum or a backward's input."""
    problems = check(changed(PLAN, key, lambda a: (replace(a, after=tuple(k for k in a.after if k != dropped)),)))
    assert len(problems) == 1
    assert f"of microbatch {key.microbatch}" in problems[0]


def test_a_wait_for_too_early_a_microbatch_is_reported() -> None:
    plan = plan_routes([(0, 1, 0)] * 4, "1f1b", 2)
    early = changed(plan, Key("forward", 3, 0), lambda a: (replace(a, after=(Key("backward", 0, 0),)),))
    [problem] = check(early)
    assert problem.startswith("the forward of microbatch 3 at stage 0, hop 0, may start with 2 microbatches under way")


@given(plans(backward=True), st.data())
def test_every_missing_backward_is_reported(plan: StepPlan, data: st.DataObject) -> None:
    backwards = sorted(a.key for actions in plan.actions.values() for a in actions if a.kind == "backward")
    lost = data.draw(st.sets(st.sampled_from(backwards), min_size=1, max_size=len(backwards) - 1))
    rest = {stage: tuple(a for a in actions if a.key not in lost) for stage, actions in plan.actions.items()}
    assert len([p for p in check(replace(plan, actions=rest)) if "is missing" in p]) == len(lost)


def test_an_action_without_a_microbatch_is_reported() -> None:
    stray = Action("forward", 7, 1, 1, 0, 2)
    plan = replace(PLAN, actions=PLAN.actions | {1: (*PLAN.actions[1], stray)})
    assert check(plan) == ["the forward of microbatch 7 at stage 1, hop 1, belongs to no microbatch: there are 3"]


def test_a_wait_for_another_stage_is_reported() -> None:
    plan = changed(PLAN, Key("forward", 0, 1), lambda a: (replace(a, after=(Key("forward", 0, 0),)),))
    assert check(plan) == [
        "the forward of microbatch 0 at stage 1, hop 1, waits for the forward of microbatch 0 at hop 0, elsewhere"
    ]


def test_a_cycle_is_reported_as_a_deadlock() -> None:
    plan = changed(PLAN, Key("forward", 0, 1), lambda a: (replace(a, after=(Key("forward", 2, 1),)),))
    plan = changed(plan, Key("forward", 2, 1), lambda a: (replace(a, after=(Key("forward", 0, 1),)),))
    [problem] = check(plan)
    assert "deadlocks" in problem
    assert problem.endswith("F0.1←0→2 at stage 1 waits for F2.1←0→3 at stage 1 waits for F0.1←0→2")


def test_require_raises_the_first_problem() -> None:
    with pytest.raises(UserError, match=r"microbatch 0 goes from node 1 to node 2.*\(and 1 more\)"):
        require(rerouted((1, 3, 2), (0, 0)))
