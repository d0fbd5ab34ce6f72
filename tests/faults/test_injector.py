"""A trace of faults on the fleet: which worker gets which, when, and what follows from their reports."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import InjectFault
from planaria.faults.checks import neighbours
from planaria.faults.trace import Fault, Trace, write
from planaria.runtime.preparation.config_checks import read_faults
from planaria.runtime.preparation.unused_settings import without_effect
from planaria.runtime.resolved_run import ResolvedRun
from support.injected_faults import HOLDERS, chaos, run, state

STATE = state()


def injected(number: int, node: int, name: str = "SIGKILL", step: int = 0) -> e.FaultInjected:
    return e.FaultInjected(worker=f"w{node}", node=node, signal=name, step=step, moment="any", number=number)


def lost(node: int) -> e.WorkerLost:
    return e.WorkerLost(worker=f"w{node}", incarnation=3, cause="connection", detail="")


def rebuild(step: int, node: int) -> d.Form:
    source = d.Rebuild(by="checkfree", donors=[node - 1, node + 1])
    sources = {s: source if s == node else d.Keep() for s in HOLDERS}
    members = [d.Member(node=s, stage=s, worker=w, source=sources[s]) for s, w in HOLDERS.items()]
    return d.Form(generation=2, step=step, outcome="recovered", members=members, links=[])


@pytest.mark.parametrize("moment", ["any", "forward", "backward"])
def test_a_worker_gets_its_fault_in_its_step(moment: Any) -> None:
    injector, fleet = chaos(Fault(step=3, stage=2, signal="slow", moment=moment, offset=0.5, strength=4.0))
    for step in range(3):
        injector.on_decision(run(step), STATE)
    assert not fleet.sent_orders
    injector.on_decision(run(3, mode="evaluate"), STATE)
    assert not fleet.sent_orders, "a validation is no step"
    injector.on_decision(run(3), STATE)
    fault_order = InjectFault(number=0, signal="slow", moment=moment, offset=0.5, seconds=None, strength=4.0)
    assert fleet.sent_orders == [("w2", fault_order)]
    assert injector.on_event(0.0, injected(0, 2), STATE) == []
    injector.on_decision(run(3), STATE)
    assert len(fleet.sent_orders) == 1, "a fault is injected once, also if its step is repeated"


def test_an_attack_is_sent_with_its_end_also_in_a_resumed_run() -> None:
    lie = Fault(step=3, stage=2, signal="corrupt_update", attack="ipm", strength=0.5, until=6)
    for first, step, reported in ((0, 3, True), (3, 3, True), (5, 5, True), (6, 6, False)):
        injector, fleet = chaos(lie, first_step=first)
        injector.on_decision(run(step), STATE)
        plain = {"number": 0, "signal": "corrupt_update", "moment": "any", "offset": 0.0, "seconds": None}
        fault_order = InjectFault(**plain, strength=0.5, attack="ipm", until=6)
        assert fleet.sent_orders == ([("w2", fault_order)] if reported else [])
    injector, fleet = chaos(Fault(step=3, stage=2, signal="corrupt_update"), first_step=4)
    injector.on_decision(run(4), STATE)
    assert not fleet.sent_orders, "it was sent in an earlier part of the run"


@pytest.mark.parametrize(
    ("moment", "decision"),
    [
        ("commit", d.Commit(generation=1, step=1, progress=1)),
        ("save", d.Save(generation=1, step=1)),
        ("settle", d.Settle(round=0, members=[0], generations=[1])),
        ("link", rebuild(1, 2)),
        ("transfer", rebuild(1, 2)),
    ],
)
def test_every_moment_begins_with_its_own_decision(moment: Any, decision: d.Decision) -> None:
    injector, fleet = chaos(Fault(step=1, stage=3, moment=moment))
    now = replace(STATE, replicas=MappingProxyType({0: replace(STATE.replicas[0], step=1)}))
    injector.on_decision(run(1), now)
    assert not fleet.sent_orders
    injector.on_decision(decision, now)
    assert fleet.numbers() == [("w3", 0)]


@pytest.mark.parametrize(("stage", "hit"), [(1, True), (2, True), (3, True), (4, False)])
def test_a_transfer_is_struck_at_the_giving_or_the_taking_end(stage: int, hit: bool) -> None:
    injector, fleet = chaos(Fault(step=2, stage=stage, moment="transfer"))
    injector.on_decision(rebuild(1, 2), STATE)
    assert not fleet.sent_orders, "it is for step 2"
    injector.on_decision(rebuild(2, 2), STATE)
    assert fleet.numbers() == ([(f"w{stage}", 0)] if hit else [])


def test_kills_of_one_step_strike_in_the_order_of_their_moments() -> None:
    injector, fleet = chaos(Fault(step=1, stage=2, offset=0.9), Fault(step=1, stage=4, offset=0.1))
    injector.on_decision(run(1), STATE)
    assert fleet.numbers() == [("w4", 1)]
    injector.on_decision(run(1), STATE)
    assert fleet.numbers() == [], "it has not been injected yet"
    injector.on_event(0.0, injected(1, 4), STATE)
    injector.on_decision(run(1), STATE)
    assert fleet.numbers() == [("w2", 0)]


def test_kills_of_one_moment_strike_together() -> None:
    injector, fleet = chaos(Fault(step=1, stage=2, offset=0.5), Fault(step=1, stage=3, offset=0.5))
    injector.on_decision(run(1), STATE)
    assert fleet.numbers() == [("w2", 0)]
    (mate,) = injector.on_event(0.0, injected(0, 2, step=1), STATE)
    assert (mate.worker, mate.node, mate.number) == ("w3", 3, 1)
    assert fleet.signals == [("w3", 3, signal.SIGKILL)]


def test_a_worker_that_dies_otherwise_leaves_its_fault_for_later() -> None:
    injector, fleet = chaos(Fault(step=1, stage=2), Fault(step=1, stage=3))
    injector.on_decision(run(1), STATE)
    fleet.numbers()
    injector.on_event(0.0, lost(2), STATE)
    injector.on_decision(run(1), STATE)
    assert fleet.numbers() == [("w2", 0)]
    assert [mate.node for mate in injector.on_event(0.0, injected(0, 2), STATE)] == [3]


def test_a_frozen_worker_resumes_in_time() -> None:
    injector, fleet = chaos(Fault(step=0, stage=2, signal="stop", resume_after_s=1.5))
    injector.on_decision(run(0), STATE)
    injector.on_event(10.0, injected(0, 2, "SIGSTOP"), STATE)
    assert injector.next_due() == 11.5
    injector.resume_due(11.4)
    assert not fleet.signals
    injector.resume_due(11.5)
    assert fleet.signals == [("w2", 3, signal.SIGCONT)]
    assert injector.next_due() is None


def test_a_vacant_stage_is_struck_once_someone_holds_it() -> None:
    injector, fleet = chaos(Fault(step=0, stage=2))
    injector.on_decision(run(0), state({s: w for s, w in HOLDERS.items() if s != 2}))
    assert not fleet.sent_orders
    injector.on_decision(run(0), STATE)
    assert fleet.numbers() == [("w2", 0)]


def test_a_fault_whose_step_was_skipped_strikes_later() -> None:
    injector, fleet = chaos(Fault(step=1, stage=2, moment="commit"))
    injector.on_decision(d.Commit(generation=1, step=4, progress=4), STATE)
    assert fleet.numbers() == [("w2", 0)]


def test_a_resumed_run_skips_earlier_faults() -> None:
    injector, fleet = chaos(Fault(step=1, stage=2), Fault(step=5, stage=3), first_step=5)
    injector.on_decision(run(5), STATE)
    assert fleet.numbers() == [("w3", 1)]


def test_no_bit_is_flipped_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    injector, _ = chaos(Fault(step=0, stage=2, signal="flip"), folder=tmp_path)
    assert injector.on_decision(run(0), STATE) == []


# ---- faults of edges that a run does not have


def changed(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"model": {"layers": 4}, "pipeline": {"stages": 4}, **sections})


def test_a_pipeline_is_a_ring_and_copies_travel_over_edges_too() -> None:
    resolved = ResolvedRun(changed())
    assert neighbours(resolved, 1) == {0, 2}
    assert neighbours(resolved, 0) == {1, len(resolved.arrangement.stage) - 1}
    assert neighbours(ResolvedRun(changed(recovery={"strategy": "redundant"})), 2) >= {1, 3}


def test_a_fault_of_a_missing_edge_names_the_existing_ones(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    config = changed(chaos={"trace": str(path)})
    write(Trace(faults=(Fault(step=1, stage=3, peer=2, signal="delay"),)), path)
    assert len(read_faults(ResolvedRun(config)).faults) == 1
    write(Trace(faults=(Fault(step=1, stage=3, peer=1, signal="delay"),)), path)
    with pytest.raises(UserError, match=r"the edge 1 → 3, which does not exist; 3 has edges to: 2, 4"):
        read_faults(ResolvedRun(config))


@pytest.mark.parametrize("wrong", [{"signal": "slow", "peer": 1}, {"signal": "delay", "peer": 2}])
def test_only_faults_of_edges_have_a_peer_and_it_is_another_node(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="peer"):
        Fault.model_validate({"step": 1, "stage": 2, **wrong})


def test_a_run_without_spares_reports_that_it_can_only_diagnose() -> None:
    config = changed(fleet={"diagnose": "act", "spares": 0})
    output = list(without_effect(ResolvedRun(config.model_copy(update={"engine": "fleet"})), Trace(faults=())))
    assert any("slow workers are only reported" in line for line in output)
    assert not list(without_effect(ResolvedRun(changed(fleet={"diagnose": "act", "spares": 1})), Trace(faults=())))
