"""``planaria join``: errors before any worker is started."""

from __future__ import annotations

import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread, Timer
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from planaria import __version__
from planaria.config.schema import FleetConfig, RunConfig
from planaria.runtime.fleet.base import Joined, Workplace
from planaria.runtime.fleet.joinable_fleet import JoinedMachines, RunInvitation
from planaria.runtime.fleet.joined_machine import Ending, RunMembership
from planaria.runtime.fleet.joining import ConnectionClosing, RunAddress, publish_run_address
from planaria.runtime.fleet.process_pool import ProcessPool
from planaria.runtime.fleet.remote import RemoteFleet
from planaria.runtime.preparation import run_folders
from planaria.runtime.transport.secure import new_key
from planaria.runtime.worker.setup import SETUP, Setup
from support.command_line import exit_code, refused
from support.live.holders import written_key


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that is not being trained."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    run_folders.write_config(folder, RunConfig(name="mine"))
    return folder


@pytest.fixture
def machines(run: Path, request: pytest.FixtureRequest) -> Iterator[JoinedMachines]:
    """The controller's side of a run without a data folder; with ``cuda``, of a run on GPUs."""
    device = getattr(request, "param", "cpu")
    config = RunConfig.model_validate({"name": "mine", "train": {"device": device}})
    setup = SETUP.dump_json(Setup(config, run, run / "nowhere", "127.0.0.1", new_key())).decode()
    fleet = led(setup, new_key())
    yield fleet.hosts
    fleet.close(patience_s=0.0)


def led(setup: str, key: bytes, port: int = 0, heartbeat_s: float = 1.0) -> RemoteFleet[JoinedMachines]:
    """Return a controller's fleet of joined machines, which are lost after four heartbeats."""
    config = FleetConfig(heartbeat_s=heartbeat_s)
    machines = partial(JoinedMachines, info=RunInvitation(setup, 1, "", {}), config=config)
    return RemoteFleet(config, "127.0.0.1", key, machines, port)


@pytest.fixture
def address(run: Path, machines: JoinedMachines) -> Path:
    return publish_run_address(run, machines.address, machines.key)


def closed_port() -> int:
    """A port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def mistake(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    return refused(capfd, "join", *arguments)


def test_a_folder_that_is_not_a_run_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    err = mistake(capfd, run.parent / "yours")
    assert "yours: not a run" in err and f"runs in {run.parent}: mine" in err


def test_a_run_without_a_controller_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert f"it is not being trained on a fleet; start it with `planaria train --resume {run}`" in mistake(capfd, run)


@pytest.mark.parametrize("end", ["", "}"])
def test_a_damaged_address_file_or_key_is_refused_without_showing_it(
    run: Path, capfd: pytest.CaptureFixture[str], end: str
) -> None:
    (run / "address.json").write_text('{"at": "127.0.0.1:1", "key": "not shown"' + end)
    err = mistake(capfd, run)
    assert "address.json: damaged" in err and "not shown" not in err


def test_an_unreachable_controller_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    publish_run_address(run, f"127.0.0.1:{closed_port()}", new_key())
    with run_folders.lock_for_training(run):
        err = mistake(capfd, run)
    assert "the controller does not answer (Connection refused)" in err and "fleet.host" in err
    err = mistake(capfd, run)
    assert "address.json: the run's controller was killed" in err and f"--resume {run}" in err


def test_joining_is_retried_for_the_given_patience(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written_key(tmp_path / "key")
    code = exit_code("join", f"127.0.0.1:{closed_port()}", "--key-file", tmp_path / "key", "--patience", "0.7")
    out, err = capfd.readouterr()
    assert code == 2 and "the controller does not answer (Connection refused)" in err
    assert out.count("no answer yet; trying for up to 0.7 s\n") == 1


def test_a_late_controller_is_reached_and_a_wrong_key_is_not_retried(
    tmp_path: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written_key(tmp_path / "key")
    port, fleets = closed_port(), list[RemoteFleet[JoinedMachines]]()

    def begin() -> None:
        setup = SETUP.dump_json(Setup(run_folders.config_of(run), run, run, "127.0.0.1", new_key())).decode()
        fleets.append(led(setup, new_key(), port))

    timer = Timer(0.7, begin)
    timer.start()
    err = mistake(capfd, f"127.0.0.1:{port}", "--key-file", tmp_path / "key", "--patience", "20")
    timer.join()
    fleets[0].close(patience_s=0.0)
    assert f"127.0.0.1:{port} does not know this key" in err


def test_the_address_of_another_run_is_refused(run: Path, address: Path, capfd: pytest.CaptureFixture[str]) -> None:
    port = int(RunAddress.model_validate_json(address.read_text()).at.rpartition(":")[2])
    publish_run_address(run, f"127.0.0.1:{port}", new_key())
    assert f"127.0.0.1:{port} does not know this key" in mistake(capfd, run)


@pytest.mark.usefixtures("address")
def test_another_version_of_planaria_is_refused(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planaria.runtime.fleet.joined_machine.planaria", SimpleNamespace(__version__="0.0.1"))
    err = mistake(capfd, run)
    assert f"has planaria 0.0.1, the run {__version__}: install the same on both" in err


@pytest.mark.usefixtures("address")
def test_a_machine_without_the_data_or_room_for_it_is_refused(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    err = mistake(capfd, run)
    assert "cannot store the run's files in /proc/nowhere/planaria" in err and "set another --cache" in err


@pytest.mark.parametrize("machines", ["cuda"], indirect=True)
@pytest.mark.usefixtures("address")
def test_a_machine_without_a_gpu_is_refused_by_a_run_on_gpus(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(run))
    machine = f"this machine ({platform.node()})"
    line = mistake(capfd, run)
    assert f"{machine} has no CUDA device (nvidia-smi is not on its PATH)" in line
    assert "join from one that has more" in line


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--workers=0", "--workers 0: use 1 to 256"),
        ("--workers=1000", "1000"),
        ("--patience=-1", "'--patience': -1: not a duration"),
    ],
)
def test_invalid_numbers_are_refused(run: Path, capfd: pytest.CaptureFixture[str], flag: str, named: str) -> None:
    assert named in mistake(capfd, run, flag)


def test_a_rejected_machine_exits_with_an_error(
    run: Path, machines: JoinedMachines, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_run_address(run, machines.address, machines.key)

    class Service:
        """Without workers."""

        next_access = None

        def __init__(self, membership: RunMembership, *_: object) -> None:
            self._membership = membership

        def serve_until_end(self, asked: Callable[[], str]) -> Ending:
            machines.remove_machine(self._membership.welcome.host, "its disk is full")
            return self._membership.serve_until_end(cast(ProcessPool, None), 60.0, asked, print)

        def close(self) -> None:
            self._membership.end()

    monkeypatch.setattr("planaria.runtime.engine.machine_service._MachineService", Service)
    assert exit_code("join", run) == 1
    assert capfd.readouterr().err == f"planaria: {run}: the run dismissed this machine: its disk is full\n"


@pytest.mark.usefixtures("address")
def test_a_signal_interrupts_the_preparations(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching files and importing modules may take minutes."""
    began = time.monotonic()

    def fetching(*_: object) -> Workplace:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
        raise AssertionError("not interrupted")

    monkeypatch.setattr("planaria.runtime.engine.machine_service.local_workplace", fetching)
    assert exit_code("join", run) == 0
    assert capfd.readouterr().out.endswith("starting workers\nleft\n")
    assert time.monotonic() - began < 300


def test_relative_paths_are_resolved_once_for_all_attempts(
    tmp_path: Path, run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key file is read before every attempt, independent of the workers' folder."""
    key, port = new_key(), closed_port()
    (tmp_path / "key").write_text(key.hex())
    (tmp_path / "key").chmod(0o600)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    service = "planaria.runtime.engine.machine_service"
    monkeypatch.setattr(f"{service}.local_workplace", lambda *_: Workplace(print, elsewhere))  # type: ignore[arg-type]
    monkeypatch.setattr(ProcessPool, "warm_up", lambda pool: None)
    setup = SETUP.dump_json(Setup(run_folders.config_of(run), run, run, "127.0.0.1", key)).decode()

    def controllers() -> None:
        for again in (True, False):
            fleet = led(setup, key, port, heartbeat_s=15.0)
            while not any(isinstance(notice, Joined) for notice in fleet.poll(0.1)):
                pass
            fleet.hosts.closing = ConnectionClosing(
                reason="the run is " + ("about to begin" if again else "over"), again=again
            )
            fleet.close(patience_s=0.0)

    thread = Thread(target=controllers, daemon=True)
    thread.start()
    code = exit_code("join", f"127.0.0.1:{port}", "--key-file", "key", "--cache", "cache", "--patience", "60")
    thread.join(60.0)
    out, err = capfd.readouterr()
    assert (code, err) == (0, ""), out + err
    assert out.count("joined\n") == 2 and out.endswith("the run is over\n")


def test_only_the_owner_can_read_the_address_file(run: Path) -> None:
    assert publish_run_address(run, "127.0.0.1:1", b"key").stat().st_mode & 0o077 == 0
