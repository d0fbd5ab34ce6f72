"""The controller as a separate process: killed, interrupted, stopped, faulted from another terminal, or lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from planaria import train as train_by_url
from planaria.cli.fault_injection import request_fault
from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.runtime.checkpoint.mirror import Mirror
from planaria.runtime.fleet.joining import RUN_ADDRESS_FILE
from support.live.harness import (
    assert_no_orphans,
    checked,
    commits,
    digests,
    ending,
    facts,
    live,
    living,
    losses,
    newest,
    outcomes,
    resume,
    steps,
    tiny,
    train,
)
from support.netns import NotAllowedError, own_loopback
from support.processes import planaria

FOREVER = 10_000
STOPPED_S = 3.0
"""three times as long as a worker may be silent"""


def assert_as_if_uninterrupted(record: RunRecord, folder: Path) -> None:
    """Compare the losses, bit for bit, with an undisturbed run over the same steps."""
    assert ending(record).outcome == "finished"
    assert losses(record) == losses(train(tiny(folder, steps=record.config.train.steps)))


@pytest.mark.usefixtures("ground")
def test_a_killed_controller_leaves_no_workers_and_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    with live(tiny(tmp_path, steps=FOREVER, checkpoint={"every": 10})) as run:
        run.wait_until(lambda record: steps(record) >= 15)
        workers = living(run.folder)
        assert len(workers) >= 5
        os.kill(max(workers), signal.SIGSTOP)  # a frozen worker receives nothing; it must end too
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.end()[0] == -signal.SIGKILL
    assert (run.folder / RUN_ADDRESS_FILE).exists()
    output = planaria("join", run.folder)
    assert output.returncode == 2 and "the run's controller was killed" in output.stderr, output
    step = newest(run.folder).step
    record = resume(run.folder, train__steps=str(step + 10))
    assert facts(record, e.RunStarted)[1].first_step == step >= 10
    assert not (run.folder / RUN_ADDRESS_FILE).exists()
    before, after = (form.generation for form in facts(record, d.Form))
    assert before < after, "a generation is never used twice"
    assert_as_if_uninterrupted(record, tmp_path / "uninterrupted")


@pytest.mark.usefixtures("ground")
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_stop_signal_ends_the_run_saved_at_a_whole_step(tmp_path: Path, number: signal.Signals) -> None:
    with live(tiny(tmp_path, steps=FOREVER)) as run:
        run.wait_until(lambda record: steps(record) >= 5)
        os.killpg(run.process.pid, number)  # as a terminal or a service manager does: workers receive it too
        code, errors = run.end()
    assert not (run.folder / RUN_ADDRESS_FILE).exists()
    assert code == 1 and errors.startswith("planaria: ") and errors.count("\n") == 1, errors
    stopped = newest(run.folder)
    assert stopped.whole and stopped.step >= 5
    record = resume(run.folder, train__steps=str(stopped.step + 5))
    assert facts(record, d.Commit)[-1].step == stopped.step + 4 and len(facts(record, d.Commit)) == stopped.step + 5
    assert_as_if_uninterrupted(record, tmp_path / "uninterrupted")


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
def test_a_live_run_can_be_struck_from_another_terminal(tmp_path: Path) -> None:
    with live(tiny(tmp_path, steps=FOREVER)) as run:
        run.wait_until(lambda record: steps(record) >= 3)
        output = planaria("run", "chaos", run.folder, "--kill", "stage=2")
        assert output.returncode == 0 and "SIGKILL" in output.stdout, output
        recovered = run.wait_until(lambda record: "recovered" in outcomes(record))
        record = run.wait_until(lambda record: steps(record) > steps(recovered) + 3)
        assert [m.stage for m in facts(record, d.Form)[1].members if isinstance(m.source, d.Rebuild)] == [2]
        assert [(f.node, f.moment) for f in facts(record, e.FaultInjected)] == [(2, "another terminal")]
        assert request_fault(run.folder, "stage=3", {"signal": "slow", "resume_after_s": 0.5}).startswith("slow for w")
        run.wait_until(lambda record: [f.signal for f in facts(record, e.FaultInjected)] == ["SIGKILL", "slow"])
        with pytest.raises(UserError, match="has no strength"):
            request_fault(run.folder, "stage=3", {"signal": "reset", "strength": 2.0})
        with pytest.raises(UserError, match="there is one replica, so no other replica receives the update"):
            request_fault(run.folder, "stage=3", {"signal": "corrupt_update", "attack": "zero", "until": 9})


@pytest.mark.slow
def test_a_controller_that_was_stopped_for_a_while_keeps_all_its_workers(tmp_path: Path) -> None:
    """Alone, as on a busy host, and with its workers, as when a laptop is suspended."""
    with live(tiny(tmp_path, steps=FOREVER, fleet={"missed_heartbeats": 4})) as run:
        record = run.wait_until(lambda record: steps(record) >= 3)
        for stop in (os.kill, os.killpg):
            stop(run.process.pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            stop(run.process.pid, signal.SIGCONT)
            before = steps(record)
            record = run.wait_until(lambda record, before=before: steps(record) >= before + 5)
        assert not facts(record, e.WorkerLost)
        os.kill(next(fact.pid for fact in facts(record, e.WorkerJoined) if fact.worker == "w2"), signal.SIGKILL)
        record = run.wait_until(lambda record: bool(facts(record, e.WorkerLost)))
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == (1, "planaria: stopped by SIGTERM\n")
    (lost,) = facts(record, e.WorkerLost)
    assert lost.cause == "connection"


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_one_line(tmp_path: Path) -> None:
    with live(tiny(tmp_path, steps=FOREVER)) as run:
        run.wait_until(lambda record: steps(record) >= 3)
        (run.folder / "checkpoints").write_text("not a folder")
        os.kill(run.process.pid, signal.SIGINT)
        code, errors = run.end()
    assert code == 2 and errors.startswith("planaria: ") and errors.count("\n") == 1, errors
    assert str(run.folder / "checkpoints") in errors and "MB free there" in errors


@pytest.mark.slow
def test_a_run_stopped_while_its_loopback_is_down_saves_its_last_commit(tmp_path: Path) -> None:
    try:
        with own_loopback() as name:
            prefix = ["ip", "netns", "exec", name]
            with live(tiny(tmp_path, stages=2, steps=FOREVER, fleet={"stop_s": 1.0, "spares": 0}), prefix) as run:
                run.wait_until(lambda record: commits(record) > 3, 150.0)
                subprocess.run([*prefix, "ip", "link", "set", "lo", "down"], check=True)
                before = -1
                while (now := commits(read_run(run.folder))) != before:  # until a step is stuck
                    before = now
                    time.sleep(0.5)
                run.process.send_signal(signal.SIGTERM)
                code, errors = run.end(100.0)
    except NotAllowedError as error:
        pytest.skip(str(error))
    record = checked(run.folder)
    step = commits(record)
    assert code == 1 and f"planaria: stopped by SIGTERM; step {step} was dropped: no result from stages" in errors
    assert "(cannot connect to 127.0.0.1:" in errors and ending(record).outcome == "stopped"
    assert newest(run.folder).whole and newest(run.folder).step == step


@pytest.mark.timeout(200)
def test_a_run_whose_machine_is_lost_resumes_from_its_store_bit_for_bit(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    here, mirror = tmp_path / "here", Mirror(store, "run")
    slow = {"emulate": "links", "latency_s": 0.03}
    config = tiny(here, stages=2, steps=500, checkpoint={"every": 3, "store": store}, network=slow)
    with live(config) as run:
        run.wait_until(lambda _: len(mirror.names()) > 1, 100.0)
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert_no_orphans(run.folder)
    step = int(mirror.names()[-1].removeprefix("step-"))
    shutil.move(here / "corpus.txt", tmp_path / "corpus.txt")
    shutil.rmtree(here)
    steps = {"train.steps": str(step + 4), "data.source": str(tmp_path / "corpus.txt"), "network.emulate": "false"}
    resumed = train_by_url(mirror.url, resume=True, progress=False, settings={"out": str(tmp_path / "there"), **steps})
    (tmp_path / "whole").mkdir()
    shutil.copy(tmp_path / "corpus.txt", tmp_path / "whole")
    whole = train(tiny(tmp_path / "whole", stages=2, steps=step + 4))
    assert digests(resumed.folder, step + 4) == digests(whole.folder, step + 4)
