"""The controller as a process of its own: killed, interrupted, and struck at from another terminal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from harness import RunRecord, ending, facts, live, living, losses, outcomes, resume, tiny, train

from planaria.cli.commands import chaos
from planaria.common.errors import UserError
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.fleet.joining import DOOR
from processes import planaria

FOREVER = 10_000
STOPPED_S = 3.0
"""three times as long as a worker may be silent"""


def steps(record: RunRecord) -> int:
    return len(losses(record))


def assert_as_if_uninterrupted(record: RunRecord, folder: Path) -> None:
    """Bit for bit the losses of a run over the same steps that nothing happened to."""
    assert ending(record).outcome == "finished"
    assert losses(record) == losses(train(tiny(folder, steps=record.config.train.steps)))


@pytest.mark.usefixtures("ground")
def test_when_the_controller_dies_all_workers_go_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    with live(tiny(tmp_path, steps=FOREVER, checkpoint={"every": 10})) as run:
        run.wait_until(lambda record: steps(record) >= 15)
        workers = living(run.folder)
        assert len(workers) >= 5
        os.kill(max(workers), signal.SIGSTOP)  # a frozen worker hears nothing; it must not be left over either
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.end()[0] == -signal.SIGKILL
    assert (run.folder / DOOR).exists()
    said = planaria("join", run.folder)
    assert said.returncode == 2 and "left behind by a controller that was killed" in said.stderr, said
    newest = CheckpointStore(run.folder / "checkpoints").newest()
    assert newest is not None
    record = resume(run.folder, train__steps=str(newest.step + 10))
    assert facts(record, e.RunStarted)[1].first_step == newest.step >= 10
    assert not (run.folder / DOOR).exists()
    before, after = (form.generation for form in facts(record, d.Form))
    assert before < after, "a generation is never used twice"
    assert_as_if_uninterrupted(record, tmp_path / "uninterrupted")


@pytest.mark.usefixtures("ground")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGQUIT))],
)
def test_what_asks_to_stop_stops_at_a_whole_step_saved_and_resumable(tmp_path: Path, number: signal.Signals) -> None:
    with live(tiny(tmp_path, steps=FOREVER)) as run:
        run.wait_until(lambda record: steps(record) >= 5)
        os.killpg(run.process.pid, number)  # as a terminal or a service manager does: workers hear it too
        code, errors = run.end()
    assert not (run.folder / DOOR).exists()
    assert code == 1 and errors.startswith("planaria: ") and errors.count("\n") == 1, errors
    stopped = CheckpointStore(run.folder / "checkpoints").newest()
    assert stopped is not None and stopped.whole and stopped.step >= 5
    record = resume(run.folder, train__steps=str(stopped.step + 5))
    assert facts(record, d.Commit)[-1].step == stopped.step + 4 and len(facts(record, d.Commit)) == stopped.step + 5
    assert_as_if_uninterrupted(record, tmp_path / "uninterrupted")


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
def test_a_live_run_can_be_struck_from_another_terminal(tmp_path: Path) -> None:
    with live(tiny(tmp_path, steps=FOREVER)) as run:
        run.wait_until(lambda record: steps(record) >= 3)
        said = planaria("chaos", run.folder, "--kill", "stage=2")
        assert said.returncode == 0 and "SIGKILL" in said.stdout, said
        recovered = run.wait_until(lambda record: "recovered" in outcomes(record))
        record = run.wait_until(lambda record: steps(record) > steps(recovered) + 3)
        assert [m.stage for m in facts(record, d.Form)[1].members if isinstance(m.source, d.Rebuild)] == [2]
        assert [(f.node, f.moment) for f in facts(record, e.FaultInjected)] == [(2, "another terminal")]
        assert chaos.ask(run.folder, "stage=3", {"signal": "slow", "resume_after_s": 0.5}).startswith("slow for w")
        run.wait_until(lambda record: [f.signal for f in facts(record, e.FaultInjected)] == ["SIGKILL", "slow"])
        with pytest.raises(UserError, match="has no strength"):
            chaos.ask(run.folder, "stage=3", {"signal": "reset", "strength": 2.0})
        with pytest.raises(UserError, match="there is one replica, so that nobody hears it"):
            chaos.ask(run.folder, "stage=3", {"signal": "lie", "attack": "zero", "until": 9})


@pytest.mark.slow
def test_a_controller_that_was_stopped_for_a_while_goes_on_with_all_its_workers(tmp_path: Path) -> None:
    """Alone, as on a busy host, and with its workers, as when a laptop's lid is closed."""
    with live(tiny(tmp_path, steps=FOREVER, fleet={"missed": 4})) as run:
        record = run.wait_until(lambda record: steps(record) >= 3)
        for stop in (os.kill, os.killpg):
            stop(run.process.pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            stop(run.process.pid, signal.SIGCONT)
            before = steps(record)
            record = run.wait_until(lambda record, before=before: steps(record) >= before + 5)  # type: ignore[misc]
        assert not facts(record, e.WorkerLost)
        os.kill(next(fact.pid for fact in facts(record, e.WorkerJoined) if fact.worker == "w2"), signal.SIGKILL)
        record = run.wait_until(lambda record: bool(facts(record, e.WorkerLost)))
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == (1, "planaria: stopped by SIGTERM\n")
    (lost,) = facts(record, e.WorkerLost)
    assert lost.cause == "connection"


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_one_clear_line(tmp_path: Path) -> None:
    with live(tiny(tmp_path, steps=FOREVER)) as run:
        run.wait_until(lambda record: steps(record) >= 3)
        (run.folder / "checkpoints").write_text("not a folder")
        os.kill(run.process.pid, signal.SIGINT)
        code, errors = run.end()
    assert code == 2 and errors.startswith("planaria: ") and errors.count("\n") == 1, errors
    assert str(run.folder / "checkpoints") in errors and "MB free there" in errors
