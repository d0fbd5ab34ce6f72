"""A worker's assignment: changes by orders, and the fields that its reports take from it."""

from __future__ import annotations

import pytest

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig, ModelConfig, PipelineConfig, RunConfig
from planaria.control.facts import events as e
from planaria.control.facts.decisions import PREDECESSOR, BeginRound, Form, Keep, Member
from planaria.control.facts.events import Fact
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.assignment import Assignment

RECIPE = RunConfig(
    engine="fleet",
    model=ModelConfig(vocab=64, dim=16, layers=4, heads=2, hidden=32, context=8),
    pipeline=PipelineConfig(stages=2),
    exchange=ExchangeConfig(replicas=2, kind="noloco", options=Options({"every": 2})),
)
"""two replicas of stages 0, 1, 2: nodes 0, 1, 2 and 3, 4, 5"""


@pytest.fixture
def sent() -> list[Fact]:
    return []


@pytest.fixture
def assignment(sent: list[Fact]) -> Assignment:
    """Of stage 1 in replica 1, whose stage 2 is absent."""
    members = [Member(node=node, stage=node - 3, worker=f"w{node}", source=Keep()) for node in (3, 4)]
    created = Assignment("w4", ResolvedRun(RECIPE), sent.append)
    created.move(4, Form(replica=1, generation=7, step=9, outcome="recovered", members=members, links=[]))
    return created


def test_a_form_order_assigns_node_and_stage(assignment: Assignment) -> None:
    assert (assignment.node, assignment.stage, assignment.replica, assignment.generation, assignment.step) == (
        4,
        1,
        1,
        7,
        9,
    )
    assert (set(assignment.present.stage), assignment.absent) == ({3, 4}, {5})
    assert assignment.number == 1, "the second of the nodes of stage 1"
    assert [assignment.stage_of(node) for node in (PREDECESSOR, 0, 5)] == [1, 0, 2]
    named = ["stage 2 of replica 0", "stage 1 of replica 1", "stage 1 of replica 1 before"]
    assert [assignment.name_of(node) for node in (2, 4, PREDECESSOR)] == named


@pytest.mark.parametrize(("generations", "ours"), [([3, 7], True), ([7, 6], False)])
def test_an_order_is_ours_if_its_generation_is(assignment: Assignment, generations: list[int], ours: bool) -> None:
    assert assignment.is_ours(BeginRound(round=1, members=[0, 1], generations=generations, links=[])) is ours


def test_a_report_has_the_assignment_fields_of_its_event(assignment: Assignment, sent: list[Fact]) -> None:
    assignment.report(e.StageReady, mode="evaluate", loss=2.5)
    assignment.report(e.UpdateReceived, round=3, replica=0)
    assignment.report(e.StageSaved, generation=6, step=8, bytes=10)
    assignment.report_broken(3, "closed")
    assert sent == [
        e.StageReady(worker="w4", stage=1, generation=7, step=9, replica=1, mode="evaluate", loss=2.5),
        e.UpdateReceived(worker="w4", node=4, generation=7, round=3, replica=0),
        e.StageSaved(worker="w4", stage=1, generation=6, step=8, bytes=10, node=4),
        e.EdgeBroken(
            worker="w4", node=4, peer=3, generation=7,
            detail="worker w4 (stage 1 of replica 1) and stage 0 of replica 1: closed at step 9, generation 7",
            cause="closed",
        ),
    ]  # fmt: skip
