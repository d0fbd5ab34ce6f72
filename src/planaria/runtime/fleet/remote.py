"""A fleet whose workers connect to the controller from any machine; :class:`Hosts` start them."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from planaria.config.names import WorkerId
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet.base import (
    MAX_REPORT_BYTES,
    THAW_LIMIT_S,
    FaultRequested,
    Joined,
    Leaving,
    Left,
    Notice,
    Reported,
    WorkerEnded,
)
from planaria.runtime.fleet.control_connections import ControlConnection, ControlListener
from planaria.runtime.fleet.heartbeats import HeartbeatMonitor
from planaria.runtime.transport.listener import ConnectingPeer


class Hosts(Protocol):
    """Starts and ends processes on other machines. Only ``close`` may block."""

    def start(self, worker: str, incarnation: int) -> None:
        """Start a worker; the outcome is reported to :class:`HostReportQueue`."""

    def release_slot(self, worker: str, incarnation: int) -> None:
        """Release the slot of an incarnation that counts as dead."""

    def signal(self, worker: str, incarnation: int, number: int) -> None: ...

    def close(self) -> None: ...


HostsType = TypeVar("HostsType", bound=Hosts)


@dataclass(frozen=True)
class Spawned:
    """A host has started the process, which has not connected yet."""

    worker: str
    incarnation: int


@dataclass(frozen=True)
class Lost:
    """A worker has ended, could not be started, or must end."""

    worker: str
    incarnation: int
    detail: str


@dataclass(frozen=True)
class Unreturned:
    """A worker of a former controller should have returned by now."""

    worker: str
    incarnation: int


HostReport = (
    Spawned | Lost | Unreturned | Leaving | Joined | Left | FaultRequested | tuple[ConnectingPeer, ControlConnection]
)
"""report of a host, or a worker's new connection"""


@dataclass(eq=False)
class _Worker:
    worker: str
    incarnation: int
    last_seen: float | None = None
    """None until its host has started it, which may take any time"""
    connection: ControlConnection | None = None
    pid: int | None = None
    ended: bool = False
    queued: list[bytes] | None = None
    """orders to a worker that returns from a former controller, until it has; None for other workers"""


@dataclass
class HostReportQueue:
    """Queue of reports from other threads for the controller's next ``poll``."""

    _reports: SimpleQueue[HostReport] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self.wakeup, self._waker = socket.socketpair()
        self.wakeup.setblocking(False)
        self._waker.setblocking(False)

    def put(self, report: HostReport) -> None:
        """Add a report and wake the controller."""
        self._reports.put(report)
        with contextlib.suppress(OSError):  # already awake, or closed
            self._waker.send(b"!")

    def take(self) -> list[HostReport]:
        """Return and remove all reports."""
        reports: list[HostReport] = []
        with contextlib.suppress(BlockingIOError):
            self.wakeup.recv(1 << 12)
        with contextlib.suppress(Empty):
            while True:
                reports.append(self._reports.get_nowait())
        return reports

    def close(self) -> None:
        self.wakeup.close()
        self._waker.close()


class RemoteFleet(Generic[HostsType]):
    """The fleet protocol over TCP. A worker is lost with its connection, by its host's report, or by silence."""

    def __init__(
        self,
        config: FleetConfig,
        host: str,
        key: bytes,
        hosts: Callable[[HostReportQueue, ControlListener], HostsType],
        port: int = 0,
        advertise: str = "",
    ) -> None:
        """Listen at ``host`` for connections with the ``key``; ``hosts`` makes the object that starts workers.

        :raises UserError: if the port is taken or ``host`` is not an address of this machine.
        """
        self._silence = HeartbeatMonitor[_Worker].of(config)
        self._queue = HostReportQueue()
        self.control_listener = ControlListener(
            host, port, key, MAX_REPORT_BYTES, lambda *call: self._queue.put(call), advertise
        )
        self._workers: dict[str, _Worker] = {}
        self._everyone: list[_Worker] = []
        try:
            self.hosts = hosts(self._queue, self.control_listener)
        except BaseException:
            self.control_listener.close()
            self._queue.close()
            raise

    def spawn(self, worker: str, incarnation: int) -> None:
        self._reap()
        self._workers[worker] = _Worker(worker, incarnation)
        self._everyone.append(self._workers[worker])
        self.hosts.start(worker, incarnation)

    def expect_return(self, worker: str, incarnation: int) -> None:
        """Expect a worker that a former controller has started; orders to it wait until it has connected."""
        self._workers[worker] = _Worker(worker, incarnation, queued=[])
        self._everyone.append(self._workers[worker])

    def send(self, worker: str, text: bytes) -> None:
        self._send(self._workers[worker], text)

    def send_to_incarnation(self, worker: str, incarnation: int, text: bytes) -> None:
        zombie = self._find(worker, incarnation)
        if zombie is not None:
            self._send(zombie, text)

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        if self._find(worker, incarnation) is not None:
            self.hosts.signal(worker, incarnation, number)

    def waitables(self) -> list[Any]:
        connections = (w.connection for w in self._everyone)
        return [self._queue.wakeup, *(each for each in connections if each is not None and not each.closed)]

    def poll(self, timeout_s: float) -> list[Notice]:
        connections = {w.connection: w for w in self._everyone if w.connection is not None and not w.connection.closed}
        notices: list[Notice] = []
        wait([self._queue.wakeup, *connections], timeout_s)  # type: ignore[list-item]
        self._silence.look(timeout_s)
        ready = wait([self._queue.wakeup, *connections], 0.0)  # type: ignore[list-item]
        for report in self._queue.take():
            notices += self._process(report)
        for connection in ready:
            if connection is not self._queue.wakeup:
                notices += self._read(connections[connection])  # type: ignore[index]
        for worker, seconds in self._silence.silent_too_long(lambda _: "unknown"):
            notices += self._lose(worker, WorkerEnded(*_id(worker), "heartbeat", f"silent for {seconds:.2f} s"))
        return notices

    def _process(self, report: HostReport) -> list[Notice]:
        match report:
            case Leaving() | Joined() | Left() | FaultRequested():
                return [report]
            case Spawned():
                spawned = self._find(report.worker, report.incarnation)
                if spawned is not None and spawned.last_seen is None:
                    self._await(spawned)
            case Lost():
                lost = self._find(report.worker, report.incarnation)
                if lost is not None:
                    return self._lose(lost, WorkerEnded(*_id(lost), "exit", report.detail))
            case Unreturned():
                late = self._find(report.worker, report.incarnation)
                if late is not None and late.connection is None:
                    return self._lose(late, WorkerEnded(*_id(late), "connection", "did not return"))
            case caller, connection:
                answered = self._find(caller.worker, caller.incarnation)
                if answered is None or answered.connection is not None:
                    connection.close()  # its start was cancelled
                else:
                    answered.connection, answered.pid = connection, caller.pid
                    self._await(answered)
                    for text in answered.queued or ():
                        connection.send(text)
                    answered.queued = None
        return []

    def _await(self, worker: _Worker) -> None:
        """Record that a worker's process is alive."""
        worker.last_seen = time.monotonic()
        if not worker.ended:
            self._silence.expect(worker)

    def _read(self, worker: _Worker) -> list[Notice]:
        """Read all reports from a connection."""
        assert worker.connection is not None
        try:
            texts = worker.connection.receive()
        except (EOFError, OSError):
            worker.connection.close()
            return self._lose(worker, WorkerEnded(*_id(worker), "connection", f"pid {worker.pid}"))
        if texts:
            worker.last_seen = time.monotonic()
            if not worker.ended:
                self._silence.receive(worker)
        return [Reported(*_id(worker), text) for text in texts]

    def _lose(self, worker: _Worker, notice: WorkerEnded) -> list[Notice]:
        """Return the notice unless the worker was reported before."""
        if worker.ended:
            return []
        worker.ended = True
        self._silence.forget(worker)
        self.hosts.release_slot(worker.worker, worker.incarnation)
        return [notice]

    def _send(self, worker: _Worker, text: bytes) -> None:
        if worker.queued is not None:
            worker.queued.append(text)
        elif worker.connection is not None and not worker.connection.closed:
            worker.connection.send(text)

    def _reap(self) -> None:
        """Remove dead incarnations, and kill those that have been stopped for long."""
        for worker in [w for w in self._everyone if w.ended]:
            if worker.connection is None or worker.connection.closed:
                self._everyone.remove(worker)
            elif worker.last_seen is not None and time.monotonic() - worker.last_seen > THAW_LIMIT_S:
                self.hosts.signal(worker.worker, worker.incarnation, signal.SIGKILL)

    def _find(self, worker: str, incarnation: int) -> _Worker | None:
        return next((w for w in self._everyone if _id(w) == (worker, incarnation)), None)

    def shut_down(self) -> None:
        """Close the connections of all workers; their processes continue. Any thread may call this."""
        for worker in [*self._everyone]:
            if worker.connection is not None:
                worker.connection.shut_down()

    def close(self, patience_s: float = 2.0) -> None:
        """Wait for workers that received an order to leave, then end the rest."""
        deadline = time.monotonic() + patience_s
        while any(not w.ended for w in self._everyone) and (remaining_s := deadline - time.monotonic()) > 0:
            self.poll(remaining_s)
        self.hosts.close()
        self.control_listener.close()
        for worker in self._everyone:
            if worker.connection is not None:
                worker.connection.close()
        self._queue.close()


def _id(worker: _Worker) -> WorkerId:
    return WorkerId(worker.worker, worker.incarnation)
