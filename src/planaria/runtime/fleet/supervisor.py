"""A run's supervisor: a small process that owns its local workers, so that they outlive the controller.

The supervisor is the parent of the fork server and of the workers (:class:`LocalFleet`). It relays orders and reports
between them and one controller at a time, its leader, over a Unix socket in the run's folder. A controller with a
higher term replaces the leader; orders of a lower term are refused. It keeps a standby for the leader
(``fleet.standby = "auto"``). Without a leader for ``orphan_s``, the supervisor ends all workers and itself.

No report is lost or delivered twice between leaders. The supervisor numbers notices and keeps them until the leader has
logged them; the next leader states the last number in the log and receives the later ones. The supervisor also
remembers the last orders to each worker: a leader that repeats the log's last decision does not send these again.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from pydantic import ValidationError

from planaria.common import logs
from planaria.config.names import WorkerId
from planaria.config.schema import FleetConfig
from planaria.control.log.line_format import report_kind_of
from planaria.runtime.fleet.base import Entry, Fleet, Notice, Reported, WorkerEnded
from planaria.runtime.fleet.devices import Device
from planaria.runtime.fleet.joining import Signal, Start
from planaria.runtime.fleet.local import LocalFleet
from planaria.runtime.fleet.process import WorkerProcess, outlive_parent, peer_pid
from planaria.runtime.fleet.spawner import expect_fork, fork_server, spawner
from planaria.runtime.fleet.standby_process import StandbyProcess, stand_by_process
from planaria.runtime.fleet.supervisor_messages import (
    FROM_LEADER,
    MAX_BYTES,
    Close,
    Ended,
    LeadGranted,
    LeadRequest,
    LeadTaken,
    Logged,
    Relayed,
    Send,
)

log = logging.getLogger(__name__)
SOCKET = "supervisor.sock"
"""name of the socket in the run's folder"""
RECENT = 16
"""orders to a worker that the supervisor remembers; one decision sends a worker two at most"""
CHECK_INTERVAL_S = 0.25
"""seconds between two checks for silent workers"""
GREET_S, MAX_GREETING = 5.0, 8
"""time for a controller that has connected to greet, and maximum number of such controllers"""
_WARN_S = 3.0
"""time without a controller before a warning"""
_LIMIT = struct.pack("ll", 5, 0)
"""5 s for a message whose transfer has begun"""
_TRANSIENT = "heartbeat", "worked"
"""kinds of reports that are not repeated to the next leader"""


@dataclass(frozen=True)
class SupervisorConfig:
    """Configuration of a supervisor, from the controller that starts it."""

    folder: Path
    entry: Entry
    preload: list[str]
    fleet: FleetConfig
    devices: Sequence[Device]
    shared: str = field(repr=False)
    progress: bool = False
    """whether standbys show the run's progress"""


@contextmanager
def reachable(folder: Path) -> Iterator[str]:
    """Yield a short path of the supervisor's socket: a socket's path has at most 107 bytes."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET}"
    finally:
        os.close(handle)


class WorkerSupervisor:
    """Relays between workers and the leader; one thread."""

    def __init__(self, config: SupervisorConfig, fleet: Fleet | None = None) -> None:
        """:param fleet: the workers; by default processes of this machine."""
        self._config = config
        self._fleet: Fleet = fleet or LocalFleet(config.entry, config.preload, config.fleet, config.devices)
        self._orphan_s = config.fleet.orphan_s
        self._listener = _listen(config.folder)
        self._inode = (config.folder / SOCKET).stat().st_ino
        self._leader: Connection | None = None
        self._leader_reads = True
        """whether the leader reads messages"""
        self._greeting: dict[Connection, float] = {}
        """controllers that have connected but not greeted, oldest first, with the deadline"""
        self._term = 0
        self._led = time.monotonic()
        """time when a controller last led"""
        self._started: set[WorkerId] = set()
        self._orders: dict[str, deque[str]] = {}
        """worker → its last orders"""
        self._number = 0
        self._kept: deque[Relayed | Ended] = deque()
        """numbered notices that no leader has logged"""
        self._flushed = 0
        """number of the last notice sent to the leader"""
        self._over = False
        self._standby = StandbyProcess(self._spawn_standby) if config.fleet.standby == "auto" else None
        self._leader_pid, self._next_look = 0, 0.0
        self._warned = False
        """whether the warning that no controller leads has been logged"""

    def _spawn_standby(self) -> WorkerProcess:
        entry = partial(stand_by_process, self._config.folder, self._config.progress)
        return spawner().spawn("planaria standby", entry, self._config.preload)

    def run(self) -> None:
        """Relay until the run is over, or no controller leads for ``orphan_s``."""
        try:
            while not self._over and (self._leader or time.monotonic() - self._led < self._orphan_s):
                connections = [*self._greeting, *([self._leader] if self._leader else [])]
                ready = wait([self._listener, *connections, *self._fleet.waitables()], CHECK_INTERVAL_S)
                for notice in self._fleet.poll(0.0):
                    self._pass_on(notice)
                self._flush()
                if self._leader in ready:
                    self._handle_leader()
                for connection in [connection for connection in self._greeting if connection in ready]:
                    del self._greeting[connection]
                    self._greet(connection)
                if self._listener in ready:
                    self._accept()
                self._close_silent()
                self._watch_leader()
            if not self._over:
                log.warning(
                    "no controller has led %s for %g s (fleet.orphan_s); its workers end. To continue from the newest "
                    "checkpoint: `planaria train --resume %s`",
                    self._config.folder, self._orphan_s, self._config.folder,
                )  # fmt: skip
        finally:
            if self._standby is not None:
                self._standby.close(self._leader_pid)
            if self._is_ours():
                (self._config.folder / SOCKET).unlink(missing_ok=True)
            self._fleet.close()
            for connection in [*self._greeting]:
                connection.close()
            if self._leader is not None:
                self._lose_leader()

    def _watch_leader(self) -> None:
        """Keep a standby; warn once if no controller leads and none will."""
        now = time.monotonic()
        if now < self._next_look:  # messages may come much more often
            return
        self._next_look = now + CHECK_INTERVAL_S
        if self._standby is not None:
            self._standby.look(0 if self._leader is None else self._leader_pid)
        waits = self._standby is not None and self._standby.is_kept
        if self._leader is not None or waits or self._warned or now - self._led < _WARN_S:
            return
        self._warned = True
        log.warning(
            "no controller leads %s; its workers end after %g s (fleet.orphan_s). To lead them: "
            "`planaria train --resume %s`",
            self._config.folder, self._orphan_s, self._config.folder,
        )  # fmt: skip

    def _is_ours(self) -> bool:
        """Return whether the socket in the run's folder is still this supervisor's."""
        with suppress(OSError):
            return (self._config.folder / SOCKET).stat().st_ino == self._inode
        return False

    def _pass_on(self, notice: Notice) -> None:
        """Send a notice to the leader, and keep it if the next leader needs it too."""
        if isinstance(notice, Reported):
            transient = report_kind_of(notice.text) in _TRANSIENT
            self._number += not transient
            number = 0 if transient else self._number
            message: Relayed | Ended = Relayed(
                number=number,
                worker=notice.worker,
                incarnation=notice.incarnation,
                text=notice.text.decode(errors="replace"),
            )
        else:
            assert isinstance(notice, WorkerEnded)
            self._number += 1
            message = Ended(
                number=self._number, worker=notice.worker, incarnation=notice.incarnation,
                cause=notice.cause, detail=notice.detail,
            )  # fmt: skip
        if message.number:
            self._kept.append(message)
            self._flush()
        elif self._writable():
            self._send(message)

    def _flush(self) -> None:
        """Send the leader the numbered notices that it has not been sent, while it reads them."""
        for message in [kept for kept in self._kept if kept.number > self._flushed]:
            if not self._writable():
                return
            self._flushed = message.number
            self._send(message)

    def _writable(self) -> bool:
        """Return whether the leader takes a message without waiting; a stopped one must not stop the supervisor."""
        if self._leader is None or not self._leader_reads:
            return False
        poll = select.poll()  # `select` refuses file descriptors from 1024
        poll.register(self._leader, select.POLLOUT)
        return bool(poll.poll(0))

    def _send(self, message: Relayed | Ended | LeadGranted) -> None:
        """Send the leader a message. If it reads no more, its own last messages must still be read, up to their end."""
        if self._leader is not None and self._leader_reads:
            try:
                self._leader.send_bytes(message.model_dump_json().encode())
            except OSError:
                self._leader_reads = False
                with suppress(OSError), socket.socket(fileno=os.dup(self._leader.fileno())) as connection:
                    connection.shutdown(socket.SHUT_WR)  # it may have read half a message

    def _lose_leader(self) -> None:
        assert self._leader is not None
        self._leader.close()
        self._leader, self._led = None, time.monotonic()

    def _handle_leader(self) -> None:
        """Carry out all messages of the leader that have arrived."""
        while self._leader is not None and not self._over:
            try:
                if not self._leader.poll():
                    return
                message = FROM_LEADER.validate_json(self._leader.recv_bytes(MAX_BYTES))
            except (EOFError, OSError, ValidationError):
                self._lose_leader()
                return
            try:
                self._carry_out(message)
            except OSError as error:  # such as too many open files; the leader is not to blame
                if isinstance(message, Start):
                    self._pass_on(WorkerEnded(message.worker, message.incarnation, "exit", f"not started: {error}"))

    def _carry_out(self, message: LeadRequest | Start | Send | Signal | Logged | Close) -> None:
        match message:
            case Start(worker=worker, incarnation=incarnation):
                if WorkerId(worker, incarnation) not in self._started:
                    self._started.add(WorkerId(worker, incarnation))
                    self._orders[worker] = deque(maxlen=RECENT)
                    self._fleet.spawn(worker, incarnation)
            case Send(worker=worker, incarnation=None, text=text) if worker in self._orders:
                self._orders[worker].append(text)
                self._fleet.send(worker, text.encode())
            case Send(worker=worker, incarnation=int(incarnation), text=text):
                self._fleet.send_to_incarnation(worker, incarnation, text.encode())
            case Signal():
                self._fleet.signal(message.worker, message.incarnation, signal.Signals(message.number))
            case Logged(number=number):
                while self._kept and self._kept[0].number <= number:
                    self._kept.popleft()
            case Close():
                self._over = True
            case LeadRequest():
                self._lose_leader()  # a leader greets once

    def _accept(self) -> None:
        """Accept a controller; it leads once it has greeted. Nothing waits for its greeting."""
        try:
            handle, _ = self._listener.accept()
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                handle.setsockopt(socket.SOL_SOCKET, option, _LIMIT)
        except OSError:
            return
        self._greeting[Connection(handle.detach())] = time.monotonic() + GREET_S

    def _close_silent(self) -> None:
        """Close the connections of controllers that did not greet in time, and the oldest of too many."""
        surplus = [*self._greeting][: max(0, len(self._greeting) - MAX_GREETING)]
        late = [connection for connection, until in self._greeting.items() if time.monotonic() > until]
        for connection in {*surplus, *late}:
            del self._greeting[connection]
            connection.close()

    def _greet(self, connection: Connection) -> None:
        """Let a controller with a higher term lead, and close the connection to the former one."""
        if self._leader is not None:
            self._handle_leader()  # process its last messages, up to its end
        try:
            hello = FROM_LEADER.validate_json(connection.recv_bytes(MAX_BYTES))
            # A controller that was lost before it logged its term leaves the term to the next one.
            led = self._term if self._leader is not None else self._term - 1
            if not isinstance(hello, LeadRequest) or hello.term <= led:
                connection.send_bytes(LeadTaken(term=self._term).model_dump_json().encode())
                connection.close()
                return
        except (EOFError, OSError, ValidationError):
            connection.close()
            return
        if self._leader is not None:
            with suppress(OSError):
                self._leader.send_bytes(LeadTaken(term=hello.term).model_dump_json().encode())
            self._lose_leader()
        self._leader = connection
        self._leader_pid = peer_pid(connection.fileno())
        self._leader_reads, self._warned = True, False
        self._term = hello.term
        self._send(LeadGranted(shared=self._config.shared, sent={w: list(texts) for w, texts in self._orders.items()}))
        self._flushed = hello.received
        self._flush()


def _listen(folder: Path) -> socket.socket:
    """Listen at the supervisor's socket, which only this user can open."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    (folder / SOCKET).unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        with reachable(folder) as path:
            listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(4)
    return listener


def main(config: SupervisorConfig, handle: int) -> None:
    """Entry point of the supervisor, a fork that has imported what workers need; reports once it listens."""
    outlive_parent()
    settings = logs.from_environment()
    logs.configure(settings.level or "warning", settings.json, run=config.folder.name)
    expect_fork()
    fork_server(config.preload)
    with Connection(handle) as connection:
        supervisor = WorkerSupervisor(config)
        connection.send_bytes(b"ready")
    supervisor.run()
