"""Workers that beat on while their main thread gets no further, and faults of the disk, the links and the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import ending, facts, losses, outcomes, tiny, train

from planaria.control import events as e
from planaria.faults.trace import Fault

LIMIT_S = 2.0


OFTEN, ALSO = ("forward", "commit", "save"), ("link", "transfer")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("moment", [*OFTEN, *(pytest.param(moment, marks=pytest.mark.slow) for moment in ALSO)])
def test_a_main_thread_that_is_stuck_is_replaced_like_any_other(tmp_path: Path, moment: str) -> None:
    """Wherever it sticks. Those that wait for it are not blamed, and every sample is used once: ``train`` checks it."""
    fault = Fault.model_validate({"step": 4, "stage": 2, "signal": "stuck", "moment": moment, "offset": 0.5})
    # Somebody has to die for a state to be handed on, or for a place to be taken.
    first = [Fault(step=4, stage=3)] if moment in ("link", "transfer") else []
    config = tiny(
        tmp_path,
        steps=8,
        fleet={"timeout_s": LIMIT_S, "disk_timeout_s": LIMIT_S, "spares": 2},
        checkpoint={"every": 5},
        recovery={"strategy": "checkfree, checkpoint"},
    )
    record = train(config, [*first, fault])
    assert ending(record).outcome == "finished"
    (stuck,) = [lost for lost in facts(record, e.WorkerLost) if lost.cause == "stuck"]
    assert "its main thread has been in" in stuck.detail
    times = {type(fact): t for t, fact in record.history if fact in (stuck, *facts(record, e.FaultInjected)[-1:])}
    assert times[e.WorkerLost] - times[e.FaultInjected] < LIMIT_S + 3.0


@pytest.mark.slow
def test_a_worker_that_is_only_slow_stays(tmp_path: Path) -> None:
    fault = Fault(step=2, stage=1, signal="slow", strength=20.0, resume_after_s=2.0)
    record = train(tiny(tmp_path, steps=8, fleet={"timeout_s": LIMIT_S}), [fault])
    assert ending(record).outcome == "finished"
    assert [fact.signal for fact in facts(record, e.FaultInjected)] == ["slow"]
    assert not facts(record, e.WorkerLost) and outcomes(record) == ["started"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("signal", ["reset", "cut", "delay"])
def test_a_network_that_fails_costs_no_state(tmp_path: Path, signal: str) -> None:
    lasting = {} if signal == "reset" else {"resume_after_s": 1.0}
    fault = Fault.model_validate({"step": 3, "stage": 2, "signal": signal, "moment": "forward", **lasting})
    record = train(tiny(tmp_path, steps=6), [fault])
    assert ending(record).outcome == "finished" and len(facts(record, e.FaultInjected)) == 1
    assert not facts(record, e.WorkerLost)
    assert outcomes(record) == (["started"] if signal == "delay" else ["started", "relinked"])
    untouched = train(tiny(tmp_path / "untouched", steps=6))
    assert losses(record) == losses(untouched)
