"""Slow workers, links, data and machines are named; a slow worker hands its stage to a spare where that pays."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from planaria.cli.commands.report import diagnose
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.faults.trace import Fault, Trace, write
from planaria.report.run.diagnosis import diagnosis_of, section
from support.live.harness import facts, live, tiny, train
from support.live.joined_machines import joined_machine, stopped

SLOW_STAGE, ONSET, STEPS = 2, 14, 44
PRICES: dict[str, Any] = {"forward_s": [0.0] + [0.008] * 3, "backward_s": [0.0] + [0.016] * 3, "emulate": True}


def sleeping(folder: Path, steps: int = STEPS, **fleet: Any) -> RunConfig:
    """Three stages whose passes sleep, so that other processes do not make them slower."""
    return tiny(folder, stages=3, steps=steps, network=PRICES, fleet=fleet)


def test_a_slow_worker_hands_its_stage_to_the_spare_once(tmp_path: Path) -> None:
    config = sleeping(tmp_path, diagnose="act", spares=1)
    record = train(config, [Fault(step=ONSET, stage=SLOW_STAGE, signal="slow", strength=6.0)])

    (blamed,) = (fact for fact in facts(record, d.SlowPartFound) if fact.fault == "slow worker")
    assert blamed.nodes == [SLOW_STAGE]
    assert ONSET < blamed.step <= ONSET + 12
    (decision,) = facts(record, d.HandOverSlowStage)
    assert decision.node == SLOW_STAGE
    assert decision.worker == blamed.workers[0]
    (form,) = (form for form in facts(record, d.Form) if form.outcome == "handed over")
    assert form.holders[SLOW_STAGE] != decision.worker
    assert not facts(record, e.WorkerLost)
    (handover,) = diagnosis_of(record).handovers
    assert handover.measured_s is not None
    assert handover.measured_s < 0.7 * decision.step_s
    assert "Actions</h3>" in "".join(section(record))
    reported = diagnose(record.folder)
    assert "Nothing is slow at present." in reported
    assert f"stage {SLOW_STAGE} ({decision.worker}) is " in reported


@pytest.mark.slow
def test_a_slow_link_is_named_with_its_direction(tmp_path: Path) -> None:
    fault = Fault(step=ONSET, stage=3, peer=2, signal="delay", strength=0.03)
    record = train(sleeping(tmp_path, steps=ONSET + 13, diagnose="act"), [fault])

    blamed = facts(record, d.SlowPartFound)
    assert [(fact.fault, fact.nodes) for fact in blamed] == [("slow link", [2, 3])]
    assert blamed[0].step <= ONSET + 12
    assert not facts(record, d.HandOverSlowStage)
    assert "the link 2 → 3 is slow, in this direction" in diagnose(record.folder)


@pytest.mark.slow
def test_by_default_a_slow_worker_is_only_reported(tmp_path: Path) -> None:
    fault = Fault(step=ONSET, stage=SLOW_STAGE, signal="slow", strength=6.0)
    record = train(sleeping(tmp_path, steps=ONSET + 13, spares=1), [fault])

    assert [fact.nodes for fact in facts(record, d.SlowPartFound)] == [[SLOW_STAGE]]
    assert not facts(record, d.HandOverSlowStage)
    gauged = facts(record, e.WorkerMeasurements)
    assert median(len(fact.model_dump_json()) for fact in gauged) <= 1024, "twice in four steps"


def test_a_run_without_measurements_has_no_diagnosis(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, stages=2, steps=4, fleet={"diagnose": "off", "spares": 0}))

    assert not facts(record, e.WorkerMeasurements)
    with pytest.raises(UserError, match=r"no step has been measured \(fleet.diagnose = 'off'\)"):
        diagnose(record.folder)


@pytest.mark.slow
def test_a_stuck_link_is_named_with_its_direction(tmp_path: Path) -> None:
    """No worker is reported or lost, and no state is lost."""
    fault = Fault(step=4, stage=3, peer=2, signal="delay", strength=1000.0, resume_after_s=0.5, moment="forward")
    record = train(tiny(tmp_path, steps=8, fleet={"timeout_s": 2.0, "spares": 0}), [fault])

    blamed = [fact for fact in facts(record, d.SlowPartFound) if fact.fault == "stuck link"]
    assert [fact.nodes for fact in blamed] == [[2, 3]]
    assert blamed[0].seconds <= 4.0
    assert not facts(record, e.WorkerLost)
    assert {form.outcome for form in facts(record, d.Form)} == {"started", "relinked"}


@pytest.mark.slow
def test_slow_data_are_named_and_no_worker_is(tmp_path: Path) -> None:
    fault = Fault(step=ONSET, stage=0, signal="slow_data", strength=0.05)
    record = train(sleeping(tmp_path, steps=ONSET + 13, spares=0), [fault])

    (blamed,) = facts(record, d.SlowPartFound)
    assert (blamed.fault, blamed.nodes) == ("slow data", [0])
    assert ONSET < blamed.step <= ONSET + 12
    assert blamed.seconds >= 4 * 0.05 > 10 * blamed.past, "of a step's four batches"
    assert [fact.signal for fact in facts(record, e.FaultInjected)] == ["slow_data"]
    assert "the data of stage 0 (" in diagnose(record.folder).replace("the ends (stage 0)", "stage 0")


@pytest.mark.slow  # a machine that joins takes seconds to import what it needs
def test_a_slow_machine_is_named_and_none_of_its_workers(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    write(Trace(faults=(Fault(step=ONSET + 6, stage=3, signal="slow_host", strength=4.0),)), trace)
    prices = {**PRICES, "forward_s": [0.0] + [0.008] * 4, "backward_s": [0.0] + [0.016] * 4}
    fleet = {"local_workers": 3, "spares": 0, "join_s": 60}
    with live(tiny(tmp_path, steps=10_000, network=prices, fleet=fleet, chaos={"trace": str(trace)})) as run:
        run.wait_until(lambda record: len(facts(record, e.WorkerJoined)) == 3)
        with joined_machine(run.folder):
            run.wait_until(lambda record: len(facts(record, d.SlowPartFound)) > 0)
            record = stopped(run)
    injected = {fact.worker for fact in facts(record, e.FaultInjected)}
    machine = {s.worker for s in facts(record, d.Spawn) if s.host}
    assert injected == machine and len(machine) == 2
    (blamed,) = facts(record, d.SlowPartFound)
    assert blamed.fault == "slow host" and set(blamed.workers) == machine
