"""The fleet of a run whose workers a supervisor owns (``runtime/fleet/supervisor.py``), as its controller sees it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from pydantic import ValidationError

from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet.base import FleetWork, Message, Notice
from planaria.runtime.fleet.devices import Device
from planaria.runtime.fleet.joining import Signal, Start
from planaria.runtime.fleet.process import WorkerProcess, peer_pid
from planaria.runtime.fleet.spawner import spawner
from planaria.runtime.fleet.supervisor import SOCKET, SupervisorConfig, main, reachable
from planaria.runtime.fleet.supervisor_messages import (
    MAX_BYTES,
    TO_LEADER,
    Close,
    LeadGranted,
    LeadRequest,
    LeadTaken,
    Logged,
    Send,
)

_ANSWER_S = 10.0
"""limit for the supervisor's answer to a controller"""


def start_supervisor(
    folder: Path, work: FleetWork, config: FleetConfig, devices: Sequence[Device], shared: str, progress: bool
) -> WorkerProcess:
    """Start the supervisor of a run's workers in its own session; return its process once it listens.

    :param shared: text for later leaders
    :param progress: whether standbys show the run's progress
    :raises UserError: if it cannot be started.
    """
    supervisor = SupervisorConfig(folder.absolute(), work.entry, work.preload, config, devices, shared, progress)
    ours, theirs = Pipe()
    handle = os.dup(theirs.fileno())
    theirs.close()
    process = spawner().spawn("planaria supervisor", partial(main, supervisor), work.preload, [handle])
    try:
        process.wait_until_started(config.start_timeout_s)
        if not ours.poll(config.start_timeout_s):
            raise TimeoutError(f"no answer within {config.start_timeout_s:g} s")
        ours.recv_bytes(16)
    except (OSError, EOFError) as error:
        process.kill(1.0)
        raise UserError(
            f"fleet.standby: the supervisor of the workers could not be started ({error or 'it exited'}); "
            "see its error above, or remove fleet.standby"
        ) from None
    finally:
        ours.close()
    return process


class SupervisedFleet:
    """The fleet protocol over the connection to a run's supervisor."""

    def __init__(self, folder: Path, term: int, received: int = 0, child: WorkerProcess | None = None) -> None:
        """Lead the workers of the run in ``folder``.

        :param child: the supervisor, if it is a child of this process
        :param received: number of the last notice in the log
        :raises UserError: if no supervisor answers, or a controller with this term or a higher one leads.
        """
        self._connection, self._child = _connect(folder), child
        self._order(LeadRequest(term=term, received=received))
        try:
            is_answered = self._connection.poll(_ANSWER_S)
            answer = TO_LEADER.validate_json(self._connection.recv_bytes(MAX_BYTES)) if is_answered else None
        except (EOFError, OSError, ValidationError):
            answer = None
        if answer is None:
            raise UserError(
                f"{folder / SOCKET}: the supervisor of the workers does not answer; end it and resume the run"
            )
        if not isinstance(answer, LeadGranted):
            raise UserError(f"{folder}: another controller leads this run; stop that first")
        self.shared = answer.shared
        self._sent = {worker: set(texts) for worker, texts in answer.sent.items()}
        """worker → orders that a former leader has sent, until this one has repeated the last decision"""
        self._received = self._logged = received

    def spawn(self, worker: str, incarnation: int) -> None:
        self._order(Start(worker=worker, incarnation=incarnation))

    def send(self, worker: str, text: bytes) -> None:
        order = text.decode()
        if order not in self._sent.get(worker, ()):
            self._order(Send(worker=worker, text=order))

    def send_to_incarnation(self, worker: str, incarnation: int, text: bytes) -> None:
        self._order(Send(worker=worker, incarnation=incarnation, text=text.decode()))

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        self._order(Signal(worker=worker, incarnation=incarnation, number=int(number)))

    def waitables(self) -> list[Connection]:
        return [self._connection]

    def poll(self, timeout_s: float) -> list[Notice]:
        """Return new notices. All earlier ones have been processed and logged.

        :raises RunStopped: if another controller leads, or the supervisor has exited, and with it all workers.
        """
        self._sent.clear()
        if self._received > self._logged:
            self._logged = self._received
            self._order(Logged(number=self._logged))
        notices: list[Notice] = []
        wait([self._connection], timeout_s)
        try:
            while self._connection.poll():
                notices += self._notices(self._connection.recv_bytes(MAX_BYTES))
        except (EOFError, OSError, ValidationError):
            raise RunStopped("the supervisor of the workers has exited, and with it all workers") from None
        return notices

    def _notices(self, text: bytes) -> list[Notice]:
        message = TO_LEADER.validate_json(text)
        if isinstance(message, LeadTaken):
            raise RunStopped(f"another controller leads this run, as term {message.term}")
        if isinstance(message, LeadGranted):
            return []
        self._received = max(self._received, message.number)
        return [message.notice()]

    def close(self) -> None:
        """End the workers and the supervisor; return once it has exited."""
        self._order(Close())
        with suppress(EOFError, OSError):
            while self._connection.poll(_ANSWER_S):
                self._connection.recv_bytes(MAX_BYTES)
        self._connection.close()
        if self._child is not None:
            self._child.join(_ANSWER_S)

    def _order(self, message: Message) -> None:
        """Send a message; :meth:`poll` raises the error of a closed connection."""
        with suppress(OSError):
            self._connection.send_bytes(message.model_dump_json().encode())


def has_supervisor(folder: Path) -> bool:
    """Return whether a process listens at the socket of the run's supervisor."""
    try:
        _connect(folder).close()
    except UserError:
        return False
    return True


def supervisor_pid(folder: Path) -> int:
    """Return the process of the run's supervisor; UserError if none answers."""
    with _connect(folder) as connection:
        return peer_pid(connection.fileno())


def _connect(folder: Path) -> Connection:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with reachable(folder) as path:
            connection.connect(path)
    except OSError as error:
        connection.close()
        raise UserError(
            f"{folder / SOCKET}: no supervisor of live workers answers ({os.strerror(error.errno or 0)}); resume from "
            f"the newest checkpoint with `planaria train --resume {folder}`"
        ) from None
    return Connection(connection.detach())
