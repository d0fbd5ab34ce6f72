"""Machines that call a controller: joins, departures, silence and invalid messages; the key file."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import planaria
from planaria.common.errors import UserError
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet import joining
from planaria.runtime.fleet.base import Joined, Leaving, Left, Notice, WorkerEnded
from planaria.runtime.fleet.control_connections import BlockingConnection, call
from planaria.runtime.fleet.joinable_fleet import JoinedMachines, RunInvitation
from planaria.runtime.fleet.joined_machine import Rejected, RunMembership
from planaria.runtime.fleet.joining import RunAddress, read_or_create_key
from planaria.runtime.fleet.remote import RemoteFleet
from planaria.runtime.transport.listener import MACHINE
from planaria.runtime.transport.secure import new_key
from support.live.harness import tiny
from support.waiting import until

SILENCE_S = 3.0
"""long enough for a test that beats on a busy machine"""


class Scene:
    """A fleet of joined machines, and the other ends of their connections."""

    def __init__(self, start_s: float = 120.0, **further: Any) -> None:
        """:param further: fields of :class:`RunInvitation`"""
        info = RunInvitation('{"setup": 1}', 1, "", {}, **further)
        config = FleetConfig(heartbeat_s=SILENCE_S / 4, missed_heartbeats=4, start_timeout_s=start_s)
        machines = partial(JoinedMachines, info=info, config=config)
        self.fleet = RemoteFleet(FleetConfig(heartbeat_s=5.0), "127.0.0.1", new_key(), machines)
        self.machines, self.notices = self.fleet.hosts, list[Notice]()

    def ask_to_join(self, workers: int = 2, version: str = planaria.__version__) -> BlockingConnection:
        connection = call(self.machines.address, self.machines.key, "a machine", MACHINE)
        send(connection, joining.JoinRequest(called="a\x1b[31m machine", version=version, workers=workers))
        return connection

    def address(self) -> RunAddress:
        return RunAddress(at=self.machines.address, key=self.machines.key.hex())

    def join(self, workers: int = 2) -> BlockingConnection:
        connection = self.ask_to_join(workers)
        assert isinstance(receive(connection), joining.Welcome)
        send(connection, joining.MachineReady())
        count = len([n for n in self.notices if isinstance(n, Joined)])
        self.until(lambda: len([n for n in self.notices if isinstance(n, Joined)]) > count)
        return connection

    def spawn(self, worker: str, host: str, incarnation: int = 1) -> None:
        self.machines.expect(worker, host)
        self.fleet.spawn(worker, incarnation)

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, 20.0, lambda: self.notices.extend(self.fleet.poll(0.05)), self.notices)

    def until_any(self, kind: type[Any]) -> list[Any]:
        """Wait for a notice of this kind; return all of the kind."""
        self.until(lambda: bool(self.of_kind(kind)))
        return self.of_kind(kind)

    def poll(self) -> None:
        self.notices += self.fleet.poll(0.1)

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [notice for notice in self.notices if isinstance(notice, kind)]


def send(connection: BlockingConnection, message: Any) -> None:
    connection.send_bytes(message.model_dump_json().encode())


def receive(connection: BlockingConnection) -> Any:
    assert connection.poll(20)
    return joining.TO_MACHINE.validate_json(connection.recv_bytes())


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.fleet.close(patience_s=0.0)


def test_a_machine_gets_the_setup_and_starts_workers_on_request(scene: Scene) -> None:
    connection = scene.ask_to_join(workers=3)
    assert receive(connection) == joining.Welcome(host="g1", setup='{"setup": 1}', cwd=str(Path.cwd()))
    scene.poll()
    assert not scene.notices, "no workers before it has checked the folders"
    send(connection, joining.MachineReady())
    assert scene.until_any(Joined) == [Joined("g1", 3, "a [31m machine")], "control characters are replaced"
    scene.spawn("w7", "g1")
    assert receive(connection) == joining.Start(worker="w7", incarnation=1)
    send(connection, joining.Started(worker="w7", incarnation=1))
    worker = call(scene.machines.address, scene.machines.key, "w7", 1)
    worker.send_bytes(b"here")
    scene.until(lambda: len(scene.notices) == 2)
    scene.fleet.signal("w7", 1, 19)
    assert receive(connection) == joining.Signal(worker="w7", incarnation=1, number=19)


def test_a_machine_that_leaves_gets_no_more_workers_and_all_of_its_own_are_reported(scene: Scene) -> None:
    connection = scene.join()
    scene.spawn("w1", "g1")
    scene.spawn("w2", "g1")
    send(connection, joining.Departing(detail="SIGTERM"))
    scene.until(lambda: len(scene.of_kind(Leaving)) == 2)
    assert scene.of_kind(Left) == [Left("g1", "leaves (SIGTERM)")]
    assert scene.of_kind(Leaving) == [Leaving("w1", 1, "SIGTERM"), Leaving("w2", 1, "SIGTERM")]
    scene.spawn("w3", "g1")
    assert scene.until_any(WorkerEnded) == [WorkerEnded("w3", 1, "exit", "its machine has left")]


def test_a_failed_start_of_its_own_worker_counts_as_an_exit(scene: Scene) -> None:
    connection = scene.join()
    scene.spawn("w1", "g1")
    for worker in ("w2", "w1"):
        send(connection, joining.Failed(worker=worker, incarnation=1, detail="no memory"))
    assert scene.until_any(WorkerEnded) == [WorkerEnded("w1", 1, "exit", "no memory")]


def test_a_machine_that_leaves_before_it_is_ready_is_ignored(scene: Scene) -> None:
    connection = scene.ask_to_join()
    assert isinstance(receive(connection), joining.Welcome)
    send(connection, joining.Departing(detail="SIGTERM"))
    with pytest.raises((EOFError, OSError)):
        connection.recv_bytes()
    scene.poll()
    assert not scene.notices


def test_a_closed_connection_loses_the_machines_workers(scene: Scene) -> None:
    connection = scene.join()
    scene.spawn("w1", "g1")
    connection.close()
    scene.until_any(WorkerEnded)
    assert scene.of_kind(Left) == [Left("g1", "its connection closed")]
    assert scene.of_kind(WorkerEnded) == [WorkerEnded("w1", 1, "exit", "machine g1: its connection closed")]


@pytest.mark.slow
def test_a_silent_machine_is_lost_and_one_that_sends_heartbeats_is_not(scene: Scene) -> None:
    silent, beating = scene.join(), scene.join()
    until = time.monotonic() + 1.5 * SILENCE_S
    while time.monotonic() < until:
        send(beating, joining.Beat())
        scene.notices += scene.fleet.poll(SILENCE_S / 20)
    assert [left.host for left in scene.of_kind(Left)] == ["g1"]
    assert scene.of_kind(Left)[0].detail.startswith(f"silent for {SILENCE_S:g}.")
    with pytest.raises((EOFError, OSError)):
        silent.recv_bytes()


@pytest.mark.parametrize(
    "messages",
    [[b"{"], [b'{"kind": "root"}'], [b'{"kind": "join", "called": "x", "version": "1", "workers": 100000}'],
     [joining.MachineReady().model_dump_json().encode()], [b"[" * 100_000],
     [b'{"kind":"departing","detail":"' + b"x" * 300 + b'"}']],
)  # fmt: skip
def test_an_invalid_message_ends_only_its_connection(scene: Scene, messages: list[bytes]) -> None:
    good, connection = scene.join(), call(scene.machines.address, scene.machines.key, "a machine", MACHINE)
    for message in messages:
        connection.send_bytes(message)
    with pytest.raises((EOFError, OSError)):
        connection.recv_bytes()
    send(good, joining.Beat())
    scene.poll()
    assert scene.of_kind(Left) == [], "the others do not notice"


def test_another_version_is_refused(scene: Scene) -> None:
    goodbye = receive(scene.ask_to_join(version="0.0.1"))
    assert isinstance(goodbye, joining.ConnectionClosing) and not goodbye.welcome
    assert "has planaria 0.0.1, the run " in goodbye.reason


def test_a_dismissed_machine_receives_the_reason_and_loses_its_workers(scene: Scene) -> None:
    connection = scene.join()
    scene.spawn("w1", "g1")
    assert isinstance(receive(connection), joining.Start)
    scene.machines.remove_machine("g1", "its disk is full")
    assert receive(connection) == joining.ConnectionClosing(reason="its disk is full", welcome=False)
    assert scene.until_any(WorkerEnded) == [WorkerEnded("w1", 1, "exit", "machine g1: its disk is full")]


def test_machines_learn_of_the_end_of_a_run(scene: Scene) -> None:
    connection = scene.join()
    scene.fleet.close(patience_s=0.0)
    assert receive(connection) == joining.ConnectionClosing(reason="the run is over")


def test_a_call_while_the_port_is_being_closed_is_refused(scene: Scene) -> None:
    scene.machines.close()  # the port is closed after that
    assert receive(scene.ask_to_join()) == joining.ConnectionClosing(reason="the run is over")
    with pytest.raises(UserError, match="rejected: the run is over"):
        RunMembership(scene.address(), 2)
    scene.machines.closing = joining.ConnectionClosing(reason="the run is about to begin", again=True)
    with pytest.raises(OSError, match="the run is about to begin"):
        RunMembership(scene.address(), 2)


# ---- the file with a run's key


def test_processes_that_create_the_key_file_at_once_get_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for n in range(50):
            keys = [new_key() for _ in range(8)]
            found = set(pool.map(lambda key, n=n: read_or_create_key(tmp_path / f"key{n}", key), keys))
            assert len(found) == 1 and found < set(keys)
            assert read_or_create_key(tmp_path / f"key{n}", new_key()) in found
            assert (tmp_path / f"key{n}").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"key{n}" for n in range(50))


def test_a_key_file_that_cannot_be_created_or_is_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere/key' cannot be created \(No such file or directory\)"):
        read_or_create_key(tmp_path / "nowhere" / "key", new_key())
    (tmp_path / "empty").touch(0o600)
    with pytest.raises(UserError, match="holds no key"):
        read_or_create_key(tmp_path / "empty", new_key())


def test_a_run_with_a_key_prints_the_command_to_join_it(tmp_path: Path) -> None:
    key, connections = tmp_path / "secret" / "k", list[str]()
    key.parent.mkdir()
    for fleet in ({}, {"key": str(key)}):
        config = tiny(tmp_path, stages=1, steps=1, fleet=fleet).model_copy(update={"name": f"run{len(fleet)}"})
        planaria.train(config, progress=True, notify=connections.append)
    (connection,) = [connection for connection in connections if "planaria join" in connection]
    words = rf"join with     planaria join 127\.0\.0\.1:\d+ --key-file k    \(with a copy of {re.escape(str(key))}\)"
    assert re.fullmatch(words, connection), connection


def test_a_copy_of_the_address_serves_as_the_key(tmp_path: Path) -> None:
    run, key = tmp_path / "run", new_key()
    run.mkdir()
    joining.publish_run_address(run, "203.0.113.5:7001", key)
    command = joining.join_command(FleetConfig(port=7001), run, "203.0.113.5:7001")
    assert (
        command == f"planaria join 203.0.113.5:7001 --key-file address.json    (with a copy of {run / 'address.json'})"
    )
    assert joining.read_key(run / "address.json") == key


RETURN_S = 3.0
START_S = 2.0


@pytest.fixture
def led_remotely() -> Iterator[Scene]:
    """A new controller that expects machines g1 and g2 of a lost one, each with a worker."""
    scene = Scene(returning={"g1": [("w1", 1)], "g2": [("w2", 1)]}, return_s=RETURN_S, start_s=START_S, first=3)
    for worker in ("w1", "w2"):
        scene.fleet.expect_return(worker, 1)
    yield scene
    scene.fleet.close(patience_s=0.0)


def come_back(scene: Scene, host: str) -> BlockingConnection:
    connection = call(scene.machines.address, scene.machines.key, "a machine", MACHINE)
    send(connection, joining.JoinRequest(called="back", version=planaria.__version__, workers=1, returning=host))
    return connection


def test_a_machine_returns_with_its_worker_and_stays(led_remotely: Scene) -> None:
    """Orders wait for the worker; the limit for the preparation of new machines does not count for it."""
    scene = led_remotely
    scene.fleet.send("w1", b"first")
    connection = come_back(scene, "g1")
    assert receive(connection).host == "g1"
    send(connection, joining.MachineReady())
    worker = call(scene.machines.address, scene.machines.key, "w1", 1)
    scene.fleet.send("w1", b"second")
    deadline = time.monotonic() + START_S + 2.0
    while time.monotonic() < deadline:
        send(connection, joining.Beat())
        scene.poll()
    assert [worker.recv_bytes(), worker.recv_bytes()] == [b"first", b"second"]
    assert scene.until_any(Left) == [Left("g2", "did not return")]
    assert [(ended.worker, ended.detail) for ended in scene.of_kind(WorkerEnded)] == [
        ("w2", "machine g2 did not return")
    ]
    assert not scene.of_kind(Joined), "it is no new machine"


def test_a_worker_that_does_not_return_with_its_machine_is_lost_and_new_ones_are_not(
    led_remotely: Scene,
) -> None:
    scene = led_remotely
    connections = [come_back(scene, host) for host in ("g1", "g2")]
    assert [receive(connection).host for connection in connections] == ["g1", "g2"]
    scene.spawn("w9", "g1")
    worker = call(scene.machines.address, scene.machines.key, "w1", 1)
    deadline = time.monotonic() + RETURN_S + 1.0
    while time.monotonic() < deadline:
        for connection in connections:
            send(connection, joining.Beat())
        worker.send_bytes(b"beat")
        scene.poll()
    assert [(ended.worker, ended.detail) for ended in scene.of_kind(WorkerEnded)] == [("w2", "did not return")]


def test_a_machine_that_is_not_expected_is_refused_with_the_reason(led_remotely: Scene) -> None:
    refused = receive(come_back(led_remotely, "g7"))
    assert isinstance(refused, joining.ConnectionClosing) and not refused.welcome
    assert refused.reason == "back: the run no longer waits for its machine g7"


def test_a_machine_that_returns_to_a_run_that_is_over_learns_that(led_remotely: Scene) -> None:
    led_remotely.machines.close()
    with pytest.raises(Rejected, match="the run is over") as rejected:
        RunMembership(led_remotely.address(), 1, returning="g1")
    assert rejected.value.over


def test_a_deposed_controller_sends_no_goodbye(scene: Scene) -> None:
    connection = scene.join()
    scene.machines.closing = None
    scene.machines.close()
    with pytest.raises((EOFError, OSError)):
        connection.recv_bytes()
