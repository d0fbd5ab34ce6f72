"""Checkpoints written while training continues: exact, and whole or absent, whichever process is killed and when."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.campaign import Ledger

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.control.log.state_file import read_state
from planaria.faults import trace as traces
from planaria.faults.trace import Fault, Trace
from planaria.recovery.checkpoint import best_steps
from planaria.report.run.checkpoint_times import saves as measured
from planaria.runtime.checkpoint.store import CheckpointStore
from support.live.harness import (
    digests,
    ending,
    facts,
    folder_of,
    in_one_process,
    live,
    losses,
    outcomes,
    resume,
    signal_once,
    tiny,
    train,
)

STEPS = 12
SLOW_S = 1.0
slow = partial(Fault, signal="disk_slow", moment="save", resume_after_s=SLOW_S)
"""a file that takes a second to write, while training steps take milliseconds"""


def config(folder: Path, strategy: str = "redundant", **sections: dict[str, Any]) -> RunConfig:
    """``redundant`` restores a stage bit for bit: whatever is killed, each state equals that of an undisturbed run."""
    saves = {"every": 4, "keep": 100, "background": True} | sections.pop("checkpoint", {})
    return tiny(folder, steps=STEPS, recovery={"strategy": strategy}, checkpoint=saves, **sections)


def sealed(record: RunRecord) -> list[int]:
    return [seal.step for seal in facts(record, d.Seal)]


def saves(record: RunRecord) -> list[tuple[int, bool]]:
    return [(save.step, save.background) for save in facts(record, d.Save)]


def assert_exact(record: RunRecord, tmp_path: Path) -> None:
    """Every checkpoint is the state of its step, to the last bit, and nothing else is left."""
    plain = config(tmp_path / "plain", checkpoint={"every": 1, "keep": 100, "background": False})
    if not folder_of(plain).exists():
        in_one_process(plain, name=plain.name)
    found = CheckpointStore(record.folder / "checkpoints").list()
    assert found and {saved.step for saved in found} == set(sealed(record)), "what is there was sealed, and all of it"
    for saved in found:
        assert saved.manifest.samples == saved.step * record.config.samples
        assert digests(record.folder, saved.step) == digests(folder_of(plain), saved.step), saved.step
    assert not list((record.folder / "checkpoints").glob("*.unfinished"))
    assert Ledger([fact.model_dump(mode="json") for _, fact in record.history]).problems == []


def between(record: RunRecord, save: int) -> int:
    """Steps that were committed between an order to save and the seal."""
    place = {}
    for at, (_, fact) in enumerate(record.history):
        if isinstance(fact, d.Save | d.Seal) and fact.step == save:
            place[fact.kind] = at
    return sum(isinstance(fact, d.Commit) for _, fact in record.history[place["save"] : place["seal"]])


def test_training_continues_while_a_file_is_written_and_the_next_save_waits(tmp_path: Path) -> None:
    record = train(config(tmp_path), [slow(step=4, stage=2)])
    assert ending(record).outcome == "finished"
    assert saves(record)[0] == (4, True) and saves(record)[-1] == (12, False), "the last one is waited for"
    assert between(record, 4) >= 4, "a save that came due meanwhile did not stop the run"
    assert sealed(record) == [step for step, _ in saves(record)]
    copies, files = facts(record, e.StageCopied), facts(record, e.StageSaved)
    assert len(copies) == 5 * sum(beside for _, beside in saves(record)) and all(f.seconds > 0 for f in files)
    assert 0 < max(copy.seconds for copy in copies) < SLOW_S
    made = measured(record)
    assert made.sealed == len(sealed(record)) and made.paused_s > 0
    assert sum(copy.seconds for copy in copies) / 5 <= made.paused_s and made.background_s > 0
    assert_exact(record, tmp_path)


@pytest.mark.slow
def test_a_kill_during_the_copy_costs_that_checkpoint(tmp_path: Path) -> None:
    kill = signal_once(lambda decision: isinstance(decision, d.Save) and decision.step == 4, signal.SIGKILL, stage=2)
    record = train(config(tmp_path), hook=kill)
    assert ending(record).outcome == "finished" and outcomes(record) == ["started", "recovered"]
    assert saves(record)[:2] == [(4, True), (4, True)], "it is tried again as soon as all are there"
    assert sealed(record)[0] == 4 and sealed(record)[-1] == 12
    assert_exact(record, tmp_path)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("strategy", ["redundant", "checkpoint"])
def test_a_kill_during_the_write_costs_that_checkpoint(tmp_path: Path, strategy: str) -> None:
    """A rollback leads to the checkpoint before; files written for the abandoned one are never sealed."""
    blows = [slow(step=8, stage=2, resume_after_s=30.0), Fault(step=9, stage=2, moment="forward", offset=0.5)]
    record = train(config(tmp_path, strategy), blows)
    assert ending(record).outcome == "finished"
    assert [f.signal for f in facts(record, e.FaultInjected)] == ["disk_slow", "SIGKILL"]
    assert ("rolled back" in outcomes(record)) == (strategy == "checkpoint")
    assert len([step for step, _ in saves(record) if step >= 8]) > len([step for step in sealed(record) if step >= 8])
    back = [form for form in facts(record, d.Form) if form.outcome == "rolled back"]
    assert [form.step for form in back] == [4] * len(back)
    assert_exact(record, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["redundant", "checkpoint"])
def test_a_kill_after_the_write_costs_nothing(tmp_path: Path, strategy: str) -> None:
    """Another worker still writes. A rollback waits for it, and leads to what is sealed then."""
    killed = Fault(step=11, stage=2, moment="backward", offset=0.5)  # its file had seven steps' time
    blows = [slow(step=4, stage=3), killed]
    record = train(config(tmp_path, strategy), blows)
    assert ending(record).outcome == "finished"
    assert [f.signal for f in facts(record, e.FaultInjected)] == ["disk_slow", "SIGKILL"]
    assert saves(record)[0] == (4, True) and sealed(record)[0] == 4
    back = [form for form in facts(record, d.Form) if form.outcome == "rolled back"]
    assert len(back) == (strategy == "checkpoint")
    history = [fact for _, fact in record.history]
    for form in back:  # on a busy machine, a later checkpoint may be whole by then
        assert form.step == [fact.step for fact in history[: history.index(form)] if isinstance(fact, d.Seal)][-1]
    assert_exact(record, tmp_path)


@pytest.mark.slow
def test_a_file_that_cannot_be_written_costs_that_checkpoint_and_is_reported(tmp_path: Path) -> None:
    record = train(config(tmp_path), [Fault(step=4, stage=2, signal="disk_full", moment="save", resume_after_s=0.2)])
    failed = facts(record, e.SaveFailed)  # perhaps of the next as well, if that came soon enough
    assert failed[0].step == 4 and {f.stage for f in failed} == {2} and "stage-0002" in failed[0].detail
    assert outcomes(record) == ["started"] and ending(record).outcome == "finished"
    assert len(facts(record, d.Discard)) == len(failed) and 4 not in sealed(record)
    assert_exact(record, tmp_path)


@pytest.mark.slow
def test_a_worker_that_takes_too_long_to_write_is_replaced(tmp_path: Path) -> None:
    blow = slow(step=4, stage=2, resume_after_s=None)
    record = train(config(tmp_path, fleet={"disk_timeout_s": 1.0}, train={"steps": 2000}), [blow], hook=_stop_later())
    (lost,) = [lost for lost in facts(record, e.WorkerLost) if lost.cause == "stuck"]
    assert re.fullmatch(r"its file of checkpoint 4 has not been written for [\d.]+ s \(limit [\d.]+ s\)", lost.detail)
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "stopped"
    assert 4 not in sealed(record) and sealed(record)


def _stop_later() -> Any:
    """Ask the run to stop once it has saved after a recovery."""
    seen: list[d.Decision] = []

    def hook(decision: d.Decision, workers: object) -> None:
        if isinstance(decision, d.Form | d.Seal):
            seen.append(decision)
            if [fact.kind for fact in seen] == ["form", "form", "seal"]:
                os.kill(os.getpid(), signal.SIGINT)

    return hook


@pytest.mark.slow
def test_a_run_whose_controller_dies_during_a_write_resumes_from_the_checkpoint_before(tmp_path: Path) -> None:
    trace = tmp_path / "slow.json"
    traces.write(Trace(faults=(slow(step=8, stage=2, resume_after_s=5.0),)), trace)
    setup = config(tmp_path, chaos={"trace": str(trace)}, train={"steps": 2000})
    with live(setup) as run:
        run.wait_until(_writes)
        assert list((run.folder / "checkpoints").glob("*.unfinished"))
        os.kill(read_state(run.folder).controller, signal.SIGKILL)
        run.end()
    cut_off = read_run(run.folder)
    before = sealed(cut_off)[-1]
    assert before < saves(cut_off)[-1][0] < len(losses(cut_off)), "training had gone on"
    record = resume(run.folder, train__steps=str(STEPS))
    assert [started.first_step for started in facts(record, e.RunStarted)] == [0, before]
    assert ending(record).outcome == "finished" and sealed(record)[-1] == STEPS
    assert_exact(record, tmp_path)


def _writes(record: RunRecord) -> bool:
    """Does a worker write slowly while the run continues?"""
    return bool(facts(record, e.FaultInjected)) and len(losses(record)) > saves(record)[-1][0]


@pytest.mark.slow
def test_the_best_interval_counts_the_copy_and_is_no_shorter_than_a_write(tmp_path: Path) -> None:
    setup = config(
        tmp_path, checkpoint={"every": "best"}, network={"hourly_failure_probability": 0.9}, train={"steps": 60}
    )
    record = train(setup, [slow(step=10, stage=2, resume_after_s=0.5)])
    (chosen,) = facts(record, e.IntervalChosen)
    assert chosen.write_s > 0.4 > chosen.save_s
    best = best_steps(0.9, 5, chosen.step_s, chosen.save_s)
    assert chosen.steps == max(best, math.ceil(chosen.write_s / chosen.step_s)) > 1
    assert ending(record).outcome == "finished" and sealed(record)[0] == 10


@pytest.mark.slow
def test_replicas_train_while_their_files_are_written(tmp_path: Path) -> None:
    """Each saves at its own step; a checkpoint's sample counts must be what each had committed by then."""
    exchange = {"replicas": 2, "kind": "diloco", "options": {"every": 4}}
    blows: Sequence[Fault] = [slow(step=4, stage=3), Fault(step=6, stage=6, moment="forward", offset=0.5)]
    record = train(config(tmp_path, "checkfree", exchange=exchange), blows)
    assert ending(record).outcome == "finished" and sealed(record)[0] == 4 and between(record, 4) >= 2
    saved = CheckpointStore(record.folder / "checkpoints").list()
    assert all(one.whole and len(one.manifest.digests) == 10 for one in saved)
    assert ending(resume(record.folder, train__steps=str(STEPS + 4))).outcome == "finished"
