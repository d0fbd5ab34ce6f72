"""A worker's position: how orders change it, and how its reports begin."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig, ModelConfig, PipelineConfig, RunConfig
from planaria.control import events as e
from planaria.control.decisions import PREDECESSOR, BeginRound, Form, Keep, Member
from planaria.control.events import Fact
from planaria.runtime.resolved_config import ResolvedRun
from planaria.runtime.worker.assignment import Assignment

RECIPE = RunConfig(
    engine="fleet",
    model=ModelConfig(vocab=64, dim=16, layers=4, heads=2, hidden=32, context=8),
    pipeline=PipelineConfig(stages=2),
    exchange=ExchangeConfig(replicas=2, kind="noloco", options=Options({"every": 2})),
)
"""two replicas of stages 0, 1, 2: nodes 0, 1, 2 and 3, 4, 5"""


@pytest.fixture
def said() -> list[Fact]:
    return []


@pytest.fixture
def here(said: list[Fact]) -> Assignment:
    """Of stage 1 in replica 1, whose stage 2 is absent."""
    members = [Member(node=node, stage=node - 3, worker=f"w{node}", source=Keep()) for node in (3, 4)]
    made = Assignment("w4", ResolvedRun(RECIPE), said.append)
    made.move(4, Form(replica=1, generation=7, step=9, outcome="recovered", members=members, links=[]))
    return made


def test_a_form_order_assigns_the_position(here: Assignment) -> None:
    assert (here.node, here.stage, here.replica, here.generation, here.step) == (4, 1, 1, 7, 9)
    assert (set(here.present.stage), here.absent) == ({3, 4}, {5})
    assert here.number == 1, "the second of the nodes of stage 1"
    assert [here.stage_of(node) for node in (PREDECESSOR, 0, 5)] == [1, 0, 2]
    named = ["stage 2 of replica 0", "stage 1 of replica 1", "stage 1 of replica 1 before"]
    assert [here.name_of(node) for node in (2, 4, PREDECESSOR)] == named


@pytest.mark.parametrize(("generations", "ours"), [([3, 7], True), ([7, 6], False)])
def test_an_order_is_ours_if_its_generation_is(here: Assignment, generations: list[int], ours: bool) -> None:
    assert here.is_ours(BeginRound(round=1, members=[0, 1], generations=generations, links=[])) is ours


def test_a_report_begins_with_the_position_fields_of_its_event(here: Assignment, said: list[Fact]) -> None:
    here.report(e.StageReady, mode="evaluate", loss=2.5)
    here.report(e.UpdateReceived, round=3, replica=0)
    here.report(e.StageSaved, generation=6, step=8, bytes=10)
    here.report_broken(3, "closed")
    assert said == [
        e.StageReady(worker="w4", stage=1, generation=7, step=9, replica=1, mode="evaluate", loss=2.5),
        e.UpdateReceived(worker="w4", node=4, generation=7, round=3, replica=0),
        e.StageSaved(worker="w4", stage=1, generation=6, step=8, bytes=10, node=4),
        e.EdgeBroken(
            worker="w4", node=4, peer=3, generation=7,
            detail="worker w4 (stage 1 of replica 1) and stage 0 of replica 1: closed at step 9, generation 7",
            cause="closed",
        ),
    ]  # fmt: skip


def test_a_report_takes_the_fields_of_its_event_alone(here: Assignment) -> None:
    with pytest.raises(ValidationError, match="colour"):
        here.report(e.StageCommitted, colour="red")
    with pytest.raises(ValidationError, match="detail"):
        here.report(e.WorkerFailed)
