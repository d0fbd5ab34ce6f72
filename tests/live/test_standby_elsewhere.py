"""A run whose controller is lost with its machine: another machine leads it, with the stages in memory elsewhere."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import free_port

from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.runtime.preparation.run_folders import config_of
from planaria.runtime.transport.listener import reserved
from support.live.harness import Live, checked, ending, facts, live, losses, steps, train
from support.live.holders import Holders, written_key
from support.live.shared_log_run import (
    LEASE_S,
    PACE,
    followed,
    led,
    lose_machine,
    shared,
    stop_until_replaced,
    undisturbed,
)
from support.processes import planaria

pytestmark = pytest.mark.timeout(200)


def record_of(folder: Path) -> RunRecord:
    assert (folder / "model").exists()
    return checked(folder)


def test_another_machine_leads_without_losing_a_step(tmp_path: Path) -> None:
    config = shared(tmp_path, steps=60, train={"steps": 60, "eval_every": 10})
    with followed(config, tmp_path) as (run, standby, there):
        lose_machine(run)
        output, _ = standby.communicate(timeout=100)
    assert "controller lost (silent); continuing as term 2" in output
    record = record_of(there)
    assert losses(record) == undisturbed(config)
    (started,) = facts(record, e.LeaderStarted)
    assert started.cause == "silent" and not facts(record, e.WorkerLost)
    before, after = facts(record, d.Form)
    assert after.generation > before.generation and all(isinstance(m.source, d.Keep) for m in after.members)
    assert config_of(there).fleet.own_address == config.fleet.standby_at, "it is resumed at its own address"


def test_a_start_that_failed_leaves_the_name_free_and_the_key_is_created(tmp_path: Path) -> None:
    config = shared(tmp_path, steps=8)
    key = Path(str(config.fleet.key))
    key.unlink()
    with socket.create_server(("127.0.0.1", config.fleet.port)), live(config) as run:
        code, errors = run.end()
    assert code == 2 and "fleet.port" in errors, errors
    assert len(key.read_text().strip()) == 64
    with led(config, tmp_path) as (run, machines):
        machines.workers("worker", 5)
        code, errors = run.end()
    assert code == 0, errors


def test_a_quorum_of_holders_needs_no_shared_folder(tmp_path: Path) -> None:
    """A holder is lost with the controller's machine."""
    with ExitStack() as running:
        holders = Holders(tmp_path, tmp_path / "key", running)
        config = shared(tmp_path, steps=40, fleet={"shared_log": holders.url})
        holders.start_all()
        with followed(config, tmp_path) as (run, standby, there):
            run.wait_until(lambda record: steps(record) >= 8)
            holders.kill(0)
            os.killpg(run.process.pid, signal.SIGKILL)
            output, _ = standby.communicate(timeout=100)
    assert "controller lost (silent); continuing as term 2" in output
    record = record_of(there)
    assert losses(record) == undisturbed(config) and not facts(record, e.WorkerLost)


@pytest.mark.parametrize(
    ("location", "line"),
    [
        (f"quorum://{','.join(f'127.0.0.1:{free_port()}' for _ in range(3))}", "0 of 3 holders answer"),
        ("/proc/runs", "fleet.shared_log: No such file or directory: '/proc/runs'"),
        (f"ftp://127.0.0.1:{free_port()}/runs", "fleet.shared_log: ftp://127.0.0.1:"),
    ],
    ids=["holders", "folder", "server"],
)
def test_a_run_without_its_shared_log_starts_no_worker_and_leaves_its_name_free(
    tmp_path: Path, location: str, line: str
) -> None:
    with live(shared(tmp_path, fleet={"shared_log": location})) as run:
        code, errors = run.end()
    assert code == 2 and line in errors and errors.count("\n") == 1, errors
    assert not run.folder.exists()


def test_a_stopped_controller_is_replaced_and_gives_no_orders_when_it_wakes(tmp_path: Path) -> None:
    config = shared(tmp_path, steps=60, network=PACE)
    with followed(config, tmp_path) as (run, standby, there):
        run.wait_until(lambda record: steps(record) >= 8)
        stop_until_replaced(run, standby, 2)
        code, errors = run.end()
        standby.communicate(timeout=100)
    assert code == 1 and "another machine leads this run, as term 2" in errors, errors
    assert losses(record_of(there)) == undisturbed(config)
    own = steps(read_run(run.folder))
    assert own < 60, "the first controller committed nothing afterwards"


def test_a_machine_that_is_replaced_stands_by_again_if_it_may_lead(tmp_path: Path) -> None:
    """The first controller is stopped, and leads again when its successor is lost; both have saved."""
    port = free_port()
    at = f"127.0.0.1:{port}, 127.0.0.1:{free_port()}"
    fleet = {"port": port, "standby_at": at}
    config = shared(tmp_path, steps=120, checkpoint={"every": 4}, fleet=fleet, network=PACE)
    with led(config, tmp_path) as (run, machines):
        standby, there = machines.standby(1)
        machines.workers("worker", 5)
        run.wait_until(lambda record: steps(record) >= 8)
        stop_until_replaced(run, standby, 2)
        run.wait_until(lambda record: len(facts(record, e.LeaderStarted)) == 1)  # it follows
        Live(there, standby).wait_until(lambda record: steps(record) >= 40)
        os.killpg(standby.pid, signal.SIGKILL)
        code, errors = run.end(100)
    assert code == 0 and not errors, errors
    record = record_of(run.folder)
    assert [started.term for started in facts(record, e.LeaderStarted)] == [2, 3]
    assert losses(record) == undisturbed(config) and not facts(record, e.WorkerLost)
    assert list((run.folder / "checkpoints").glob("abandoned-*")), "its own from before, whose names another one used"


def test_a_standby_that_loses_its_lease_leads_again_without_help(tmp_path: Path) -> None:
    """No other machine is left that could lead."""
    config = shared(tmp_path, steps=100, network=PACE)
    with followed(config, tmp_path) as (run, standby, there):
        lose_machine(run)
        while "continuing as term 2" not in standby.line():
            pass
        Live(there, standby).wait_until(lambda record: steps(record) >= 20)
        os.killpg(standby.pid, signal.SIGSTOP)
        time.sleep(4 * LEASE_S)
        os.killpg(standby.pid, signal.SIGCONT)
        output, errors = standby.communicate(timeout=100)
    assert standby.returncode == 0 and "another machine may lead the run; standing by again" in output, (output, errors)
    record = record_of(there)
    assert [started.term for started in facts(record, e.LeaderStarted)] == [2, 3]
    assert losses(record) == undisturbed(config) and not facts(record, e.WorkerLost)
    assert losses(read_run(there)) == losses(record)


def test_the_workers_of_the_lost_machine_are_replaced(tmp_path: Path) -> None:
    """The copies are at the other machine's workers; this one starts a worker too."""
    config = shared(tmp_path, steps=60, recovery={"strategy": "redundant"}, fleet={"local_workers": 1, "spares": 1})
    with followed(config, tmp_path) as (run, standby, there):
        lose_machine(run)
        standby.communicate(timeout=100)
    record = record_of(there)
    assert [lost.worker for lost in facts(record, e.WorkerLost)] == ["w0"]
    assert losses(record) == undisturbed(config)


@pytest.mark.slow
def test_a_machine_that_returns_too_late_joins_again(tmp_path: Path) -> None:
    """It was stopped; meanwhile its stages are rebuilt from copies at the other machine's workers."""
    config = shared(tmp_path, steps=3000, recovery={"strategy": "redundant"})
    with led(config, tmp_path) as (run, machines):
        standby, there = machines.standby()
        machines.workers("worker", 5)
        late = machines.workers("late", 1)
        run.wait_until(lambda record: steps(record) >= 8)
        late.send_signal(signal.SIGSTOP)
        os.killpg(run.process.pid, signal.SIGKILL)
        running = Live(there, standby)
        running.wait_until(lambda record: bool(facts(record, e.HostLeft)), 60.0)
        late.send_signal(signal.SIGCONT)
        running.wait_until(lambda record: len(facts(record, e.HostJoined)) == 3, 60.0)
        standby.terminate()
        standby.communicate(timeout=100)
    record = checked(there)
    assert [left.detail for left in facts(record, e.HostLeft)] == ["did not return"]


def test_two_machines_are_lost_one_after_the_other(tmp_path: Path) -> None:
    config = shared(tmp_path, standbys=2, steps=80, network=PACE)
    with led(config, tmp_path) as (run, machines):
        standbys = [machines.standby(number) for number in range(2)]
        machines.workers("worker", 5)
        lose_machine(run)
        process, folder = standbys[0]
        record = Live(folder, process).wait_until(
            lambda record: bool(facts(record, e.LeaderStarted)) and steps(record) >= 20
        )
        (led_by,) = (started.pid for started in facts(record, e.LeaderStarted))
        (first, _), (second, elsewhere) = sorted(standbys, key=lambda standby: standby[0].pid != led_by)
        first.kill()
        said, _ = second.communicate(timeout=100)
    assert (elsewhere / "model").exists(), said
    record = record_of(elsewhere)
    assert [started.term for started in facts(record, e.LeaderStarted)] == [2, 3]
    assert losses(record) == undisturbed(config)


def test_a_standby_of_a_run_that_has_ended_touches_nothing_and_is_not_resumed(tmp_path: Path) -> None:
    config = shared(tmp_path, steps=8)
    log, at = f"{config.fleet.shared_log}/{config.name}", config.fleet.standby_at
    with followed(config, tmp_path) as (run, standby, there):
        code, errors = run.end()
        output, _ = standby.communicate(timeout=100)
    assert code == 0 and "the run is finished" in output, (errors, output)
    before = {path: path.stat().st_mtime_ns for path in there.rglob("*")}
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for folder in (there.parent.parent, elsewhere):
        done = planaria("join", log, "--standby", "--at", at, "--key-file", config.fleet.key, cwd=folder)
        assert done.returncode == 0 and done.stdout == "the run is finished\n", done
    assert before == {path: path.stat().st_mtime_ns for path in there.rglob("*")} and not [*elsewhere.iterdir()]
    done = planaria("train", "--resume", there, "--train.steps", "16", cwd=there.parent.parent)
    assert done.returncode == 2 and "another machine led this run last; resume it there" in done.stderr, done


@pytest.mark.parametrize("stored", [True, False])
def test_a_rollback_needs_a_checkpoint_beside_the_lost_machine(tmp_path: Path, stored: bool) -> None:
    store = {"store": f"file://{tmp_path / 'store'}"} if stored else {}
    config = shared(
        tmp_path, steps=120, recovery={"strategy": "checkpoint"}, checkpoint={"every": 40, **store},
        fleet={"local_workers": 1}, network=PACE,
    )  # fmt: skip
    mirrored = tmp_path / "store" / "run" / "checkpoints"
    with followed(config, tmp_path, workers=4) as (run, standby, there):
        run.wait_until(
            lambda record: steps(record) >= 44 and (not stored or any(mirrored.glob("step-*/manifest.json")))
        )
        os.killpg(run.process.pid, signal.SIGKILL)
        output, errors = standby.communicate(timeout=100)
    if stored:
        assert "fetched       step-" in output and standby.returncode == 0, (output, errors)
        assert losses(record_of(there)) == undisturbed(config)
    else:
        assert standby.returncode == 1 and "its newest checkpoint was only on the controller's machine" in errors, (
            errors
        )


def test_replicas_that_gossip_continue_under_another_machine(tmp_path: Path) -> None:
    exchange = {"kind": "noloco", "replicas": 2, "options": {"every": 3}}
    config = shared(tmp_path, stages=2, steps=40, exchange=exchange)
    with followed(config, tmp_path, workers=6) as (run, standby, there):
        run.wait_until(lambda record: steps(record) >= 9)
        os.killpg(run.process.pid, signal.SIGKILL)
        standby.communicate(timeout=100)
    record = record_of(there)
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerLost)


def test_a_log_that_does_not_answer_stops_the_controller_and_its_return_lets_another_lead(tmp_path: Path) -> None:
    """The folder is out of reach for everybody, as a mount that is lost; workers wait."""
    config, place = shared(tmp_path, steps=60), tmp_path / "shared"
    with followed(config, tmp_path) as (run, standby, there):
        run.wait_until(lambda record: steps(record) >= 8)
        place.rename(tmp_path / "gone")
        place.write_text("not a folder")
        code, errors = run.end()
        place.unlink()
        (tmp_path / "gone").rename(place)
        standby.communicate(timeout=100)
    assert code == 1 and "shared" in errors and errors.count("\n") == 1, errors
    assert losses(record_of(there)) == undisturbed(config)


@pytest.mark.parametrize(
    ("fleet", "line"),
    [
        ({"standby_at": ""}, "list the machines that may lead in fleet.standby_at, such as '10.0.0.2:7010'"),
        ({"standby_at": "b"}, "fleet.standby_at: 'b' is not an address; use HOST:PORT"),
        ({"standby_at": "127.0.0.1:99999"}, "fleet.standby_at: '127.0.0.1:99999' is not an address; use HOST:PORT"),
        ({"standby_at": "b:1, b:1"}, "fleet.standby_at: b:1 is listed twice; list each machine once"),
        ({"shared_log": "logs/here"}, "other machines need an absolute path; use one"),
        ({"port": 0}, "machines that lead or return need fleet.key (a file) and fleet.port"),
        ({"standby": "auto"}, "remove fleet.standby; the standbys are those of fleet.standby_at"),
        ({"orphan_s": 1.0}, "fleet.orphan_s = 1: use more than 2 × fleet.lease_s"),
        ({"shared_log": "quorum://a:1,b:2"}, "fleet.shared_log: 2 holders; use 3"),
        ({"shared_log": "quorum://a:1,b:2,c:3/run"}, "list the holders only; the run's name is added"),
        ({"shared_log": "a::b"}, "chained file systems are not supported"),
        ({"shared_log": "/dev/null"}, "fleet.shared_log = '/dev/null': is not a folder"),
    ],
)  # fmt: skip
def test_a_run_that_could_not_be_led_elsewhere_is_refused(tmp_path: Path, fleet: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        train(shared(tmp_path, fleet=fleet))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["{log}/run", "--standby", "--at", "127.0.0.1:1", "--key-file", "{key}"], "no run has its shared log there"),
        (["{log}/run", "--standby", "--at", "127.0.0.1:1"], "pass --key-file, a copy of the run's fleet.key file"),
        (["{log}/run", "--standby", "--key-file", "{key}"], "add --at HOST:PORT, where this machine leads the run"),
        (["{log}/run", "--standby"], "not the folder of a run; on another machine, RUN is LOG/NAME"),
        (["{log}/run", "--at", "127.0.0.1:1", "--key-file", "{key}"], "is for a standby; add --standby"),
        (
            ["{log}/run", "--standby", "--at", "b:1", "--key-file", "{key}", "--workers", "2"],
            "--workers 2 has no effect with --standby, which adds no workers",
        ),
    ],
)
def test_a_standby_that_could_not_lead_is_refused(tmp_path: Path, words: list[str], line: str) -> None:
    config = shared(tmp_path)
    given = [word.format(log=config.fleet.shared_log, key=config.fleet.key) for word in words]
    done = planaria("join", *given, cwd=tmp_path)
    assert done.returncode == 2 and line in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_standby_that_could_not_lead_a_live_run_is_refused_before_it_copies(tmp_path: Path) -> None:
    config = shared(tmp_path, steps=60)
    host, _, port = config.fleet.standby_at.rpartition(":")
    other = written_key(tmp_path / "other.key")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    log, at = f"{config.fleet.shared_log}/{config.name}", f"{host}:{port}"
    with led(config, tmp_path) as (_, machines):
        words = "join", log, "--standby", "--at"
        stranger = planaria(*words, at, "--key-file", other, cwd=elsewhere)
        unlisted = planaria(*words, "127.0.0.1:1", "--key-file", machines.key, cwd=elsewhere)
        with socket.create_server((host, int(port))):
            taken = planaria(*words, at, "--key-file", machines.key, cwd=elsewhere)
        with reserved(at):
            second = planaria(*words, at, "--key-file", machines.key, cwd=elsewhere)
    lines = (
        "not the run's key; copy the fleet.key file",
        "use one of them",
        f"join --at {at}: fleet.host",
        f"join --at {at}: another standby on this machine uses this address",
    )
    for done, line in zip((stranger, unlisted, taken, second), lines, strict=True):
        assert done.returncode == 2 and line in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not [*elsewhere.iterdir()]
