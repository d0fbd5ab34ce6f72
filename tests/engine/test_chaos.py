from __future__ import annotations

import signal
from dataclasses import replace
from types import MappingProxyType

import pytest

from planaria import decisions as d
from planaria import events as e
from planaria.chaos.trace import Fault, Trace
from planaria.control.state import ReplicaState, RunState, WorkerState
from planaria.engine.chaos import TraceChaos

STARTED = e.RunStarted(name="run", seed=1, stages=4, steps=9, first_step=0, samples_per_step=1, wall_time=0.0)
HOLDERS = {stage: f"w{stage}" for stage in range(5)}
STATE = replace(
    RunState.start(STARTED),
    replicas=MappingProxyType({0: replace(ReplicaState.start(STARTED), holders=MappingProxyType(HOLDERS))}),
    workers=MappingProxyType({w: WorkerState(3, "member") for w in HOLDERS.values()}),
)
FAR = 1e9


class Signals:
    """A fleet that only takes signals."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, signal.Signals]] = []

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        self.sent.append((worker, incarnation, number))


def chaos(*faults: Fault, first_step: int = 0) -> tuple[TraceChaos, Signals]:
    fleet = Signals()
    return TraceChaos(Trace(faults=faults), fleet, first_step), fleet  # type: ignore[arg-type]


def steps(made: TraceChaos, t: float, *numbers: int, length: float = 1.0) -> float:
    """Whole steps of ``length`` seconds; the time after them."""
    for step in numbers:
        made.on_decision(t, d.RunStep(generation=1, step=step), STATE)
        made.on_decision(t + length, d.Commit(generation=1, step=step, progress=step), STATE)
        t += length
    return t


def rebuild(step: int, lost: int) -> d.Form:
    source = d.Rebuild(by="checkfree", donors=[lost - 1, lost + 1])
    members = [
        d.Member(node=s, stage=s, worker=w, source=source if s == lost else d.Keep()) for s, w in HOLDERS.items()
    ]
    return d.Form(generation=2, step=step, outcome="recovered", members=members, links=[])


@pytest.mark.parametrize(("moment", "window"), [("any", (0, 1)), ("forward", (0.05, 0.4)), ("backward", (0.6, 0.95))])
@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_a_blow_falls_in_its_part_of_the_step(moment: str, window: tuple[float, float], offset: float) -> None:
    fault = Fault.model_validate({"step": 3, "stage": 2, "moment": moment, "offset": offset})
    made, fleet = chaos(fault)
    t = steps(made, 100.0, 0, 1, 2, length=2.0)
    assert made.next_due() is None
    made.on_decision(t, d.RunStep(generation=1, step=3), STATE)
    due = made.next_due()
    assert due == pytest.approx(t + 2.0 * (window[0] + offset * (window[1] - window[0])))
    assert due is not None
    assert made.strike(due - 0.001, STATE) == []
    struck = made.strike(due, STATE)
    assert struck == [e.FaultInjected(worker="w2", node=2, signal="SIGKILL", step=3, moment=moment)]
    assert fleet.sent == [("w2", 3, signal.SIGKILL)]
    assert made.next_due() is None
    steps(made, t, 3, 4)
    assert made.strike(FAR, STATE) == [], "struck twice"


def test_a_validation_is_no_step() -> None:
    made, _ = chaos(Fault(step=0, stage=1))
    made.on_decision(1.0, d.RunStep(generation=1, step=0, mode="evaluate"), STATE)
    assert made.next_due() is None


def test_a_commit_is_struck_as_it_begins() -> None:
    made, _ = chaos(Fault(step=1, stage=4, moment="commit"))
    made.on_decision(5.0, d.RunStep(generation=1, step=1), STATE)
    assert made.next_due() is None
    made.on_decision(6.0, d.Commit(generation=1, step=1, progress=1), STATE)
    assert made.next_due() == pytest.approx(6.0, abs=0.01)
    assert [f.node for f in made.strike(6.1, STATE)] == [4]


@pytest.mark.parametrize(("stage", "hit"), [(1, True), (2, True), (3, True), (4, False)])
def test_a_transfer_is_struck_at_the_giving_or_the_taking_end(stage: int, hit: bool) -> None:
    made, _ = chaos(Fault(step=2, stage=stage, moment="transfer"))
    made.on_decision(5.0, rebuild(1, 2), STATE)
    assert made.next_due() is None, "it is for step 2"
    made.on_decision(6.0, rebuild(2, 2), STATE)
    assert [f.node for f in made.strike(FAR, STATE)] == ([stage] if hit else [])


def test_a_frozen_worker_thaws_when_it_is_time() -> None:
    made, fleet = chaos(Fault(step=0, stage=2, signal="stop", resume_after_s=1.5))
    made.on_decision(0.0, d.RunStep(generation=1, step=0), STATE)
    (struck,) = made.strike(10.0, STATE)
    assert struck.signal == "SIGSTOP"
    assert made.next_due() == 11.5
    assert made.strike(11.5, STATE) == []
    assert fleet.sent == [("w2", 3, signal.SIGSTOP), ("w2", 3, signal.SIGCONT)]
    assert made.next_due() is None


def test_who_is_dead_already_is_struck_again_once_someone_holds_the_stage() -> None:
    made, fleet = chaos(Fault(step=0, stage=2))
    made.on_decision(0.0, d.RunStep(generation=1, step=0), STATE)
    left = MappingProxyType({s: w for s, w in HOLDERS.items() if s != 2})
    vacant = replace(STATE, replicas=MappingProxyType({0: replace(STATE.replicas[0], holders=left)}))
    assert made.strike(FAR, vacant) == []
    assert fleet.sent == []
    made.on_decision(FAR, d.RunStep(generation=2, step=0), STATE)
    assert [f.worker for f in made.strike(2 * FAR, STATE)] == ["w2"]


def test_a_step_that_is_repeated_is_struck_once() -> None:
    made, _ = chaos(Fault(step=1, stage=2), Fault(step=1, stage=3))
    made.on_decision(0.0, d.RunStep(generation=1, step=1), STATE)
    assert [f.node for f in made.strike(FAR, STATE)] == [2, 3]
    made.on_decision(0.0, d.RunStep(generation=2, step=1), STATE)
    assert made.strike(FAR, STATE) == []


def test_a_fault_whose_step_was_passed_over_is_made_up_for() -> None:
    made, _ = chaos(Fault(step=1, stage=2, moment="commit"))
    made.on_decision(0.0, d.Commit(generation=1, step=4, progress=4), STATE)
    assert [f.step for f in made.strike(FAR, STATE)] == [4]


def test_a_resumed_run_leaves_the_past_alone() -> None:
    made, _ = chaos(Fault(step=1, stage=2), Fault(step=5, stage=3), first_step=5)
    made.on_decision(0.0, d.RunStep(generation=1, step=5), STATE)
    assert [f.node for f in made.strike(FAR, STATE)] == [3]
