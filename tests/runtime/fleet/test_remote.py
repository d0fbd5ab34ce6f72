"""A fleet whose workers connect to the controller reports each death once, whichever source detects it first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from planaria.config.schema import FleetConfig
from planaria.runtime.fleet.base import Reported, WorkerEnded
from planaria.runtime.fleet.control_connections import BlockingConnection, ControlListener, call
from planaria.runtime.fleet.remote import HostReportQueue, Lost, RemoteFleet, Spawned
from planaria.runtime.transport.secure import new_key
from support.waiting import until

Notice = Reported | WorkerEnded


class Hosts:
    """Starts no process: the test calls for the workers."""

    def __init__(self, queue: HostReportQueue, listener: ControlListener) -> None:
        self.queue, self.listener = queue, listener
        self.given_back: list[tuple[str, int]] = []
        self.signals: list[tuple[str, int, int]] = []

    def start(self, worker: str, incarnation: int) -> None: ...

    def release_slot(self, worker: str, incarnation: int) -> None:
        self.given_back.append((worker, incarnation))

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        self.signals.append((worker, incarnation, number))

    def close(self) -> None: ...

    def join(self, worker: str, incarnation: int = 1) -> BlockingConnection:
        """A worker that has started and sent a message."""
        self.queue.put(Spawned(worker, incarnation))
        connection = call(self.listener.address, self.listener.key, worker, incarnation)
        connection.send_bytes(b"here")
        return connection


class Scene:
    def __init__(self, missed: int) -> None:
        config = FleetConfig(heartbeat_s=0.05, missed_heartbeats=missed)
        self.fleet = RemoteFleet(config, "127.0.0.1", new_key(), Hosts)
        self.hosts = self.fleet.hosts
        self.notices: list[Notice] = []

    def until(self, condition: Callable[[list[Notice]], bool]) -> list[Notice]:
        until(lambda: condition(self.notices), 20.0, lambda: self.notices.extend(self.fleet.poll(0.05)), self.notices)
        return self.notices

    def deaths(self) -> list[WorkerEnded]:
        return [n for n in self.notices if isinstance(n, WorkerEnded)]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(missed=10_000)
    yield scene
    scene.fleet.close(patience_s=0.0)


def test_a_closed_connection_is_a_death_and_the_hosts_later_report_is_ignored(scene: Scene) -> None:
    scene.fleet.spawn("w0", 1)
    worker = scene.hosts.join("w0")
    scene.until(lambda received: Reported("w0", 1, b"here") in received)
    scene.fleet.send("w0", b"order")
    assert worker.recv_bytes() == b"order"
    worker.close()
    scene.until(lambda notices: any(isinstance(n, WorkerEnded) for n in notices))
    scene.hosts.queue.put(Lost("w0", 1, "its node died"))
    scene.notices += scene.fleet.poll(0.0) + scene.fleet.poll(0.05)
    assert [lost.cause for lost in scene.deaths()] == ["connection"] and scene.hosts.given_back == [("w0", 1)]
    scene.fleet.send("w0", b"to nobody")


def test_a_host_may_report_a_death_first_and_the_zombie_is_still_served(scene: Scene) -> None:
    scene.fleet.spawn("w0", 1)
    worker = scene.hosts.join("w0")
    scene.until(bool)
    scene.hosts.queue.put(Lost("w0", 1, "its node died"))
    scene.until(lambda _: bool(scene.deaths()))
    assert [(lost.cause, lost.detail) for lost in scene.deaths()] == [("exit", "its node died")]
    scene.fleet.spawn("w0", 2)
    worker.send_bytes(b"still here")
    scene.until(lambda received: Reported("w0", 1, b"still here") in received)
    scene.fleet.send_to_incarnation("w0", 1, b"leave")
    assert worker.recv_bytes() == b"leave"


def test_a_silent_worker_is_dead_but_one_that_waits_for_a_machine_is_not() -> None:
    scene = Scene(missed=2)
    try:
        scene.fleet.spawn("waits", 1)
        scene.fleet.spawn("speaks", 1)
        worker = scene.hosts.join("speaks")
        scene.until(lambda _: bool(scene.deaths()))
        assert [(lost.worker, lost.cause) for lost in scene.deaths()] == [("speaks", "heartbeat")]
        worker.close()
    finally:
        scene.fleet.close(patience_s=0.0)


def test_a_worker_whose_start_was_given_up_is_disconnected(scene: Scene) -> None:
    scene.fleet.spawn("w0", 1)
    scene.hosts.queue.put(Lost("w0", 1, "no room"))
    scene.until(lambda _: bool(scene.deaths()))
    scene.fleet.spawn("w0", 2)  # removes the first
    late = scene.hosts.join("w0", 1)
    with pytest.raises((EOFError, ConnectionResetError)):
        while True:
            scene.fleet.poll(0.05)
            if late.poll(0.05):
                late.recv_bytes()
