"""Snapshots in the machine's memory: after all processes died, the run resumes from there, before the disk is read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.faults.trace import Fault, Trace, write
from planaria.runtime.checkpoint.memory_folder import RUN, SHARED, MemoryFolder
from support.live.harness import (
    LiveWorkers,
    RunRecord,
    ending,
    facts,
    folder_of,
    live,
    losses,
    newest,
    resume,
    tiny,
    train,
)
from support.waiting import until

SAVED = 25
"""steps between checkpoints"""
OPTIONS = {"tolerate": 1, "every": 5, "slices": 2, "persist": True}


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    for record in SHARED.glob(f"planaria-*/{RUN}"):
        with suppress(FileNotFoundError):  # of another test
            assert str(tmp_path) not in record.read_text(), "snapshots of a run that has ended"


def recipe(folder: Path, **sections: Any) -> RunConfig:
    recovery = {"strategy": "snapshot, checkpoint", "options": OPTIONS}
    return tiny(folder, **({"recovery": recovery, "checkpoint": {"every": SAVED}, "steps": 10_000} | sections))


def killed(config: RunConfig) -> tuple[MemoryFolder, int, int]:
    """Kill the controller, and so its workers, well after a checkpoint; return the steps in memory and on disk."""
    with live(config) as run:
        run.wait_until(lambda record: (made := len(losses(record))) > SAVED and 9 <= made % SAVED <= SAVED - 7)
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.end()[0] == -signal.SIGKILL
    memory, saved = MemoryFolder(folder_of(config)), newest(folder_of(config))
    remembered = next(label.step for label in memory.newest_first() if len(memory.whole_stages(label)) == 5)
    for label in memory.newest_first():  # a newer one was being written; four of its stages might suffice, too
        for path in memory.folder.glob(f"step-{label.step:08d}.*/*") if label.step > remembered else ():
            path.unlink()
    assert remembered > saved.step
    return memory, remembered, saved.step


def taken_up(config: RunConfig, steps: int, faults: Sequence[Fault] = ()) -> RunRecord:
    """Resume the run; compare every loss with an undisturbed run."""
    trace = Path(config.out).parent / "trace.json"
    write(Trace(faults=tuple(faults)), trace)
    record = resume(folder_of(config), train__steps=str(steps), chaos__trace=str(trace))
    assert ending(record).outcome == "finished"
    undisturbed = recipe(Path(config.out).parent / "undisturbed", steps=steps, recovery={"strategy": "checkfree"})
    assert {step: loss for step, loss in losses(record).items() if step < steps} == losses(train(undisturbed))
    return record


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(), (0,), (3,)])
def test_a_run_whose_processes_are_all_killed_resumes_from_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: tuple[int, ...]
) -> None:
    config = recipe(tmp_path)
    memory, step, saved = killed(config)
    for stage in lost:
        for path in memory.folder.glob(f"step-*/stage-{stage:04d}*"):
            path.unlink()
    record = taken_up(config, step + 10)
    started, output = facts(record, e.RunStarted)[-1], capsys.readouterr().out
    assert (started.first_step, started.snapshot_step, started.durable_step) == (step, step, saved)
    assert f"continues from step {step}, which is in memory" in output
    assert ("from the others' parities" in output) == bool(lost)


@pytest.mark.slow
def test_damage_beyond_the_parities_falls_back_to_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(tmp_path)
    memory, step, saved = killed(config)
    for path in memory.folder.glob("step-*/stage-000[12].safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    started = facts(taken_up(config, step + 5), e.RunStarted)[-1]
    assert started.snapshot_step == -1 and started.first_step == saved
    output = capsys.readouterr().out
    assert f"snapshot of step {step} not used, 2 of 5 stages are lost together (1, 2)" in output


@pytest.mark.slow
def test_a_rollback_after_that_leads_to_the_checkpoint(tmp_path: Path) -> None:
    """Two are lost at once: the checkpoint is older than the resumed step, and its samples are used again."""
    config = recipe(tmp_path)
    _, step, saved = killed(config)
    record = taken_up(config, step + 6, [Fault(step=step + 1, stage=stage, moment="forward") for stage in (2, 3)])
    forms = [(form.outcome, form.step) for form in facts(record, d.Form)]
    assert ("rolled back", saved) in forms


class ControllerKilled(Exception):
    """Ends the controller at once."""


def test_snapshots_newer_than_a_rollback_are_never_resumed_from(tmp_path: Path) -> None:
    """Two stages are lost together; the controller is killed after the rollback."""
    config = recipe(
        tmp_path,
        recovery={"strategy": "snapshot, checkpoint", "options": OPTIONS | {"every": 3, "code": "local"}},
        checkpoint={"every": 10},
    )
    memory, seen = MemoryFolder(folder_of(config)), list[d.Form]()

    def newer() -> bool:
        return any(label.step > 10 and len(memory.whole_stages(label)) == 5 for label in memory.newest_first())

    def hook(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.Commit) and seen:
            raise ControllerKilled
        if isinstance(decision, d.Form) and decision.is_rollback:
            seen.append(decision)
        if isinstance(decision, d.Commit) and decision.step == 16:
            until(newer, 60.0)
            for stage in (2, 3):
                workers.signal(signal.SIGKILL, stage)

    with pytest.raises(ControllerKilled):
        train(config, hook=hook)
    assert [(form.outcome, form.step) for form in seen] == [("rolled back", 10)] and newer()
    record = resume(folder_of(config), train__steps="18")  # its ledger is checked there
    started = facts(record, e.RunStarted)[-1]
    assert (started.first_step, started.snapshot_step) == (10, -1) and ending(record).outcome == "finished"


def test_snapshots_without_a_step_between_them_cannot_outlive(tmp_path: Path) -> None:
    config = recipe(tmp_path, recovery={"strategy": "snapshot", "options": {"persist": True}})
    with pytest.raises(UserError, match="persist = true: with every = 0 there are no snapshots"):
        train(config)
