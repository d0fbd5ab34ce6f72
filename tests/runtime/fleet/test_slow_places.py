"""Data that come late, and machines that are slow, are named for what they are: no worker is blamed for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import facts, live, tiny, train
from test_join import guest, stopped
from test_slow_workers import ONSET, PRICES, sleeping

from planaria.cli.commands.diagnose import diagnose
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.faults.trace import Fault, Trace, write


@pytest.mark.slow
def test_data_that_come_late_are_named_and_no_worker_is(tmp_path: Path) -> None:
    fault = Fault(step=ONSET, stage=0, signal="slow_data", strength=0.05)
    record = train(sleeping(tmp_path, steps=ONSET + 13, spares=0), [fault])

    assert [(fact.fault, fact.nodes) for fact in facts(record, d.Blamed)] == [("slow data", [0])]
    (blamed,) = facts(record, d.Blamed)
    assert ONSET < blamed.step <= ONSET + 12
    assert blamed.seconds >= 4 * 0.05 > 10 * blamed.past, "of a step's four batches"
    assert [fact.signal for fact in facts(record, e.FaultInjected)] == ["slow_data"]
    assert "the data of stage 0 (" in diagnose(record.folder).replace("the ends (stage 0)", "stage 0")


@pytest.mark.slow  # a machine that joins takes seconds to import what it needs
def test_a_slow_machine_is_named_and_none_of_its_workers(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    write(Trace(faults=(Fault(step=ONSET + 6, stage=3, signal="slow_host", strength=4.0),)), trace)
    prices = {**PRICES, "forward_s": [0.0] + [0.008] * 4, "backward_s": [0.0] + [0.016] * 4}
    fleet = {"own": 3, "spares": 0, "join_s": 60}
    config = tiny(tmp_path, steps=10_000, network=prices, fleet=fleet, chaos={"trace": str(trace)})
    with live(config) as run:
        run.wait_until(lambda record: len(facts(record, e.WorkerJoined)) == 3)
        with guest(run.folder):
            run.wait_until(lambda record: len(facts(record, d.Blamed)) > 0)
            record = stopped(run)
    struck = {fact.worker for fact in facts(record, e.FaultInjected)}
    machine = {s.worker for s in facts(record, d.Spawn) if s.host}
    assert struck == machine and len(machine) == 2
    (blamed,) = facts(record, d.Blamed)
    assert blamed.fault == "slow host" and set(blamed.workers) == machine
