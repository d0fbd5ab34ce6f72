"""Stages whose workers die are rebuilt from their neighbours; losses equal those of inline with the same losses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.faults.trace import Fault
from planaria.report.run.stage_peaks import stage_peaks
from support.live.harness import (
    apart,
    ending,
    facts,
    inline,
    losses,
    outcomes,
    rebuilt,
    signal_once,
    tiny,
    train,
    validation_losses,
)

TOLERANCE = 1e-5


@pytest.mark.usefixtures("ground")
def test_without_faults_the_fleet_equals_inline_bit_for_bit(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, steps=50, train={"eval_every": 25}))
    assert outcomes(record) == ["started"] and ending(record).outcome == "finished"
    assert (losses(record), validation_losses(record)) == inline(record)
    assert list(losses(record)) == list(range(50)) and list(validation_losses(record)) == [0, 25, 50]
    peaks = stage_peaks(record)
    assert [(peak.workers, peak.device_bytes) for peak in peaks] == [(1, 0)] * len(record.starts[0][1].stage_of)
    assert all(2**25 < peak.bytes < 2**40 for peak in peaks)


@pytest.mark.usefixtures("ground")
def test_after_kills_at_every_moment_the_fleet_equals_inline(tmp_path: Path) -> None:
    faults = [
        Fault(step=3, stage=2, moment="forward", offset=0.5),
        Fault(step=7, stage=3, moment="backward", offset=0.5),
        Fault(step=10, stage=2, moment="commit"),
        Fault(step=14, stage=3, moment="commit", offset=0.9),
        Fault(step=18, stage=2, moment="any", offset=0.9),
    ]
    record = train(tiny(tmp_path, steps=24), faults)
    assert [f.node for f in facts(record, e.FaultInjected)] == [2, 3, 2, 3, 2]
    assert outcomes(record) == ["started"] + ["recovered"] * 5 and ending(record).outcome == "finished"
    trained, _ = inline(record)
    assert apart(losses(record), trained) <= TOLERANCE
    unharmed = train(tiny(tmp_path / "unharmed", steps=24))
    assert apart(losses(record), losses(unharmed)) > 100 * TOLERANCE, "the kills have an effect"


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
def test_without_a_spare_a_new_worker_is_started(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, fleet={"spares": 0}), [Fault(step=5, stage=2, moment="forward")])
    assert [s.incarnation for s in facts(record, d.Spawn)] == [1, 1, 1, 1, 1, 2]
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
def test_a_spare_that_dies_is_replaced(tmp_path: Path) -> None:
    hook = signal_once(
        lambda decision: isinstance(decision, d.RunStep) and decision.step == 3, signal.SIGKILL, stage=None
    )
    # Forty steps later, so that the successor has started even where processes take long to start.
    record = train(tiny(tmp_path, steps=50), [Fault(step=43, stage=2)], hook)
    dead = facts(record, e.WorkerLost)[0].worker
    assert (dead, 2) in {(s.worker, s.incarnation) for s in facts(record, d.Spawn)}
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"
    assert facts(record, d.Form)[1].members[2].worker == dead, "the spare's successor took the stage over"


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
@pytest.mark.parametrize(
    ("stages", "faults", "formations"),
    [
        (6, [Fault(step=5, stage=2), Fault(step=5, stage=5)], (1, 2)),
        (4, [Fault(step=5, stage=2, moment="forward"), Fault(step=5, stage=2, moment="transfer")], (2,)),
    ],
    ids=["two stages apart", "the receiver of a state transfer"],
)
def test_two_workers_may_die_in_one_step(
    tmp_path: Path, stages: int, faults: list[Fault], formations: tuple[int, ...]
) -> None:
    record = train(tiny(tmp_path, stages=stages, fleet={"spares": 2}), faults)
    assert [f.moment for f in facts(record, e.FaultInjected)] == [fault.moment for fault in faults]
    assert set(outcomes(record)) == {"started", "recovered"} and outcomes(record).count("recovered") in formations
    assert ending(record).outcome == "finished"
    assert {m.stage for m in rebuilt(record)} == {fault.stage for fault in faults}
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE


@pytest.mark.slow_after(1)
@pytest.mark.usefixtures("ground")
@pytest.mark.parametrize("step", [0, 10])
def test_a_kill_during_a_validation_repeats_it(tmp_path: Path, step: int) -> None:
    def validates(decision: d.Decision) -> bool:
        return isinstance(decision, d.RunStep) and (decision.mode, decision.step) == ("evaluate", step)

    record = train(tiny(tmp_path, train={"eval_every": 10}), hook=signal_once(validates, signal.SIGKILL, stage=2))
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"
    trained, validated = inline(record)
    assert apart(losses(record), trained) <= TOLERANCE
    assert apart(validation_losses(record), validated) <= TOLERANCE
