"""Silent and stuck workers are replaced, busy and slow ones stay; failures of the network cost no state."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from planaria.config.schema import FleetConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.events import REPORT, WorkReport
from planaria.faults.trace import Fault
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.fleet.base import Reported, WorkerEnded
from planaria.runtime.fleet.local import LocalFleet
from support.live import busy_worker
from support.live.harness import (
    LiveWorkers,
    apart,
    ending,
    facts,
    inline,
    living,
    losses,
    outcomes,
    signal_once,
    tiny,
    train,
)

SOON = {"missed_heartbeats": 6}
"""a worker that is silent for 1.5 s counts as dead"""
LIMIT_S = 2.0


@pytest.mark.usefixtures("ground")
def test_a_worker_that_wakes_up_after_its_stage_was_rebuilt_is_refused(tmp_path: Path) -> None:
    """Sleeping stages make the run last long enough: steps take 80 ms and more, however fast the machine."""
    pace = {"emulate": True, "forward_s": [0.004], "backward_s": [0.008]}
    frozen = Fault(step=3, stage=2, signal="stop", moment="forward", resume_after_s=2.0)
    left: set[int] = set()

    def look(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.RunStep) and decision.step == 29:
            left.update(living(workers.folder))

    record = train(tiny(tmp_path, steps=30, fleet=SOON, network=pace), [frozen], look)
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"
    zombie = facts(record, d.Form)[0].members[2].worker
    assert [(z.worker, z.incarnation) for z in facts(record, e.ZombieIgnored)] == [(zombie, 1)]
    pids = {(fact.worker, fact.incarnation): fact.pid for fact in facts(record, e.WorkerJoined)}
    assert left and pids[zombie, 1] not in left, "the zombie was ordered to leave, and did"


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
def test_a_worker_that_freezes_during_a_save_is_replaced_and_the_save_repeated(tmp_path: Path) -> None:
    hook = signal_once(lambda decision: isinstance(decision, d.Save) and decision.step == 5, signal.SIGSTOP, stage=2)
    config = tiny(tmp_path, steps=8, fleet=SOON, checkpoint={"every": 5})
    record = train(config, hook=hook)
    assert [lost.cause for lost in facts(record, e.WorkerLost)] == ["heartbeat"]
    assert [save.step for save in facts(record, d.Save)] == [5, 5, 8] and ending(record).outcome == "finished"
    assert apart(losses(record), inline(record)[0]) <= 1e-5
    saved = CheckpointStore(record.folder / "checkpoints").list()
    assert [(s.step, s.whole) for s in saved] == [(5, True), (8, True)]
    updates = [set(read_stage(saved[0].folder, stage, saved[0].step).clocks.values()) for stage in range(5)]
    assert updates == [{5}, {5}, set(), {5}, {5}], "what was saved is the rebuilt stage, not the frozen one"


@pytest.mark.slow
def test_a_worker_busy_in_one_long_operation_is_not_dead() -> None:
    fleet = LocalFleet(busy_worker.main, [], FleetConfig(heartbeat_s=busy_worker.HEARTBEAT_S))
    try:
        fleet.spawn("w0", 1)
        deadline, notices = time.monotonic() + 60, []
        while not any(isinstance(n, WorkerEnded) or b"spans" in n.text for n in notices):
            assert time.monotonic() < deadline
            notices += fleet.poll(0.1)
    finally:
        fleet.close()
    assert isinstance(notices[-1], Reported), f"{notices[-1]}"
    worked = REPORT.validate_json(notices[-1].text)
    assert isinstance(worked, WorkReport) and worked.spans[0].end - worked.spans[0].start >= busy_worker.BUSY_S


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("moment", ["forward", "commit", "save", "link", "transfer"])
def test_a_worker_with_a_stuck_main_thread_is_replaced(tmp_path: Path, moment: str) -> None:
    """Workers that wait for it are not replaced, and every sample is used once (``train`` checks that)."""
    fault = Fault.model_validate({"step": 4, "stage": 2, "signal": "stuck", "moment": moment, "offset": 0.5})
    # A state is transferred, or an edge replaced, only after another worker has died.
    first = [Fault(step=4, stage=3)] if moment in ("link", "transfer") else []
    fleet = {"timeout_s": LIMIT_S, "disk_timeout_s": LIMIT_S, "spares": 2}
    recovery = {"strategy": "checkfree, checkpoint"}
    record = train(tiny(tmp_path, steps=8, fleet=fleet, checkpoint={"every": 5}, recovery=recovery), [*first, fault])
    assert ending(record).outcome == "finished"
    (stuck,) = [lost for lost in facts(record, e.WorkerLost) if lost.cause == "stuck"]
    assert "its main thread has been in" in stuck.detail
    times = {type(fact): t for t, fact in record.history if fact in (stuck, *facts(record, e.FaultInjected)[-1:])}
    assert times[e.WorkerLost] - times[e.FaultInjected] < LIMIT_S + 3.0


@pytest.mark.slow
def test_a_slow_worker_is_not_replaced(tmp_path: Path) -> None:
    fault = Fault(step=2, stage=1, signal="slow", strength=20.0, resume_after_s=2.0)
    record = train(tiny(tmp_path, steps=8, fleet={"timeout_s": LIMIT_S}), [fault])
    assert ending(record).outcome == "finished"
    assert [fact.signal for fact in facts(record, e.FaultInjected)] == ["slow"]
    assert not facts(record, e.WorkerLost) and outcomes(record) == ["started"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("number", ["reset", "cut", "delay"])
def test_a_network_that_fails_costs_no_state(tmp_path: Path, number: str) -> None:
    lasting = {} if number == "reset" else {"resume_after_s": 1.0}
    fault = Fault.model_validate({"step": 3, "stage": 2, "signal": number, "moment": "forward", **lasting})
    record = train(tiny(tmp_path, steps=6), [fault])
    assert ending(record).outcome == "finished" and len(facts(record, e.FaultInjected)) == 1
    assert not facts(record, e.WorkerLost)
    assert outcomes(record) == (["started"] if number == "delay" else ["started", "relinked"])
    assert losses(record) == losses(train(tiny(tmp_path / "untouched", steps=6)))
