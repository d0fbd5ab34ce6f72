"""A run's folder is read while it is written: every line once and in order, also from segments."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import CHAOS, EVENTS, LogFollower
from planaria.control.log.run_record import StepMetric
from planaria.control.log.writer import RunLog
from support.report.served_runs import folder


@pytest.mark.parametrize("seed", range(8))
def test_every_line_comes_once_and_in_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    run = folder(tmp_path / "run")
    log, followed, received, reported = RunLog(run, full=rng.choice([300, 900, 5000])), LogFollower(run), [], []
    for number in range(400):
        t = 10.0 + number
        if rng.random() < 0.2:
            fact = StepMetric(t=t, step=number, loss=1.0, tokens_per_s=1.0, grad_norm={})
            log.metric(fact)
            reported.append(fact)
        else:
            decision = d.Commit(generation=1, step=number, progress=number)
            log.decision(t, decision)
            reported.append(decision)
        if rng.random() < 0.1:
            received += [fact for _, fact in followed.more()]
            assert received == reported
        if rng.random() < 0.02:  # the run is resumed
            log.close()
            log = RunLog(run, full=500)
    received += [fact for _, fact in followed.more()]
    assert received == reported and not list(followed.more()) and followed.ahead == 0
    log.close()


def test_a_torn_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    line = '{"t": 1.5, "decision": {"kind":"commit","replica":0,"generation":1,"step":3,"progress":3}}\n'
    (run / EVENTS).write_text(line + line[:40])
    followed = LogFollower(run)
    assert len(list(followed.more())) == 1
    assert not list(followed.more())
    with (run / EVENTS).open("a") as file:
        file.write(line[40:])
    assert [fact.kind for _, fact in followed.more()] == ["commit"]


def test_unneeded_kinds_are_skipped(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    log = RunLog(run)
    log.event(1.0, e.StageCommitted(worker="w0", stage=0, generation=1, step=0))
    log.decision(2.0, d.Commit(generation=1, step=0, progress=0))
    log.close()
    assert [fact.kind for _, fact in LogFollower(run).more(frozenset({"stage_committed"}))] == ["commit"]


def test_a_broken_line_is_named_by_file_and_number_also_far_into_a_log(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    log = RunLog(run)
    followed = LogFollower(run)
    for number in range(20):
        log.decision(float(number), d.Commit(generation=1, step=number, progress=number))
    assert len(list(followed.more())) == 20
    with (run / EVENTS).open("a") as file:
        file.write('{"t": 30.0, "decision": {"kind":"comit"}}\n')
    with pytest.raises(UserError, match=r"events\.jsonl:21: broken line"):
        list(followed.more())
    log.close()


def test_faults_of_other_terminals_are_read_too(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    log = RunLog(run)
    log.decision(5.0, d.Commit(generation=1, step=0, progress=0))
    fault = e.FaultInjected(worker="w1", node=1, signal="SIGKILL", step=0, moment="another terminal")
    (run / CHAOS).write_text(f'{{"t": 4.0, "event": {fault.model_dump_json()}}}\n')
    assert [fact.kind for _, fact in LogFollower(run).more()] == ["fault_injected", "commit"]
    log.close()
