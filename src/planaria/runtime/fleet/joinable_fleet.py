"""A fleet that machines can join: the run's own workers, and those of joined machines.

A joined machine runs ``runtime/fleet/joined_machine.py``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

import planaria
from planaria.common.errors import UserError
from planaria.common.printing import printable
from planaria.config.names import WorkerId
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet import joining
from planaria.runtime.fleet.base import FaultRequested, Fleet, Joined, Leaving, Left, Notice
from planaria.runtime.fleet.control_connections import ControlConnection, ControlListener
from planaria.runtime.fleet.files import FileServer
from planaria.runtime.fleet.heartbeats import HeartbeatMonitor
from planaria.runtime.fleet.joining import ConnectionClosing, publish_run_address
from planaria.runtime.fleet.remote import HostReportQueue, Lost, RemoteFleet, Spawned, Unreturned
from planaria.runtime.transport.listener import ConnectingPeer, no_answer

_MAX_MACHINES = 64
"""maximum number of machines at the same time"""


@dataclass
class _Machine:
    host: str
    connection: ControlConnection
    workers: set[WorkerId] = field(default_factory=set)
    label: str = ""
    """name for its owner; empty before its join request"""
    max_workers: int = 0
    """workers that it can start"""
    has_joined: bool = False
    has_left: bool = False


@dataclass(frozen=True)
class RunInvitation:
    """Information for machines that join."""

    setup: str
    """configuration for starting workers, as JSON"""
    workers_per_replica: int
    """default number of a machine's workers"""
    folder_id: str
    """identifies the run's folder"""
    files: Mapping[str, Path]
    """folders served to them, by the first part of a file's name"""
    first: int = 1
    """number of the first machine that joins; an earlier controller may have used smaller ones"""
    awaited: str = ""
    """name of the machine that must join before others"""
    returning: Mapping[str, Collection[WorkerId]] = field(default_factory=lambda: MappingProxyType({}))
    """machines that a former controller led → their living workers (name, incarnation)"""
    return_s: float = 0.0
    """seconds for their return"""


class JoinedMachines:
    """Implements :class:`planaria.runtime.fleet.remote.Hosts` for joined machines, with a thread for each."""

    def __init__(
        self,
        queue: HostReportQueue,
        control_listener: ControlListener,
        info: RunInvitation,
        config: FleetConfig,
    ) -> None:
        self._queue = queue
        self._info = info
        self._start_s = config.start_timeout_s
        self._missed_beats = config.heartbeat_s * config.missed_heartbeats / joining.BEAT_S
        """heartbeats of a machine: it is lost if it is silent for as long as a worker may be"""
        self._awaited = info.awaited
        self._machines: dict[str, _Machine] = {}
        self._host_of: dict[str, str] = {}
        """worker → machine of its current or next process"""
        self._numbers = count(info.first)
        self._guarded = threading.RLock()
        self._over = False
        self.closing: joining.ConnectionClosing | None = joining.ConnectionClosing(reason="the run is over")
        """message to machines when this closes, or None if the run continues elsewhere"""
        self.address, self.key = control_listener.address, control_listener.key
        self._returning = {host: {*workers} for host, workers in info.returning.items()}
        self._expected = {name for workers in info.returning.values() for name in workers}
        self._host_of |= {worker: host for host, workers in info.returning.items() for worker, _ in workers}
        control_listener.on_join = self._receive
        control_listener.on_file_request = FileServer(info.files).serve
        if info.returning:
            self._return_timer = threading.Timer(info.return_s, self._give_up_returning)
            self._return_timer.daemon = True
            self._return_timer.start()

    # ---- called by the controller's thread

    def expect(self, worker: str, host: str) -> None:
        """Assign a worker to a machine before its start."""
        self._host_of[worker] = host

    def start(self, worker: str, incarnation: int) -> None:
        with self._guarded:
            machine = self._machines.get(self._host_of[worker])
            if machine is not None and not machine.has_left:
                machine.workers.add(WorkerId(worker, incarnation))
                _send(machine.connection, joining.Start(worker=worker, incarnation=incarnation))
                return
        self._queue.put(Lost(worker, incarnation, "its machine has left"))

    def release_slot(self, worker: str, incarnation: int) -> None:
        with self._guarded:
            for machine in self._machines.values():
                machine.workers.discard(WorkerId(worker, incarnation))

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        machine = self._machines.get(self._host_of[worker])
        if machine is not None:
            _send(machine.connection, joining.Signal(worker=worker, incarnation=incarnation, number=int(number)))

    def remove_machine(self, host: str, reason: str) -> None:
        """Dismiss a machine and its workers."""
        with self._guarded:
            machine = self._machines.get(host)
            if machine is not None:
                _send(machine.connection, joining.ConnectionClosing(reason=reason, welcome=False))
                self._remove_machine(machine, reason)

    def close(self) -> None:
        """Send :attr:`closing` to all machines."""
        with self._guarded:
            self._over = True
            for machine in self._machines.values():
                if self.closing is not None:
                    _send(machine.connection, self.closing)
                machine.connection.shut_down()

    # ---- one thread for each machine

    def _receive(self, caller: ConnectingPeer, connection: ControlConnection) -> None:
        machine = _Machine(f"g{next(self._numbers)}", connection)
        detail = "its connection closed"
        try:
            self._serve(machine)
        except (EOFError, ConnectionError):
            pass
        except UserError as error:
            detail = str(error)
            _send(connection, joining.ConnectionClosing(reason=detail, welcome=False))
        except (OSError, ValidationError) as error:
            detail = str(error).partition("\n")[0]
        with self._guarded:
            self._remove_machine(machine, detail)
            self._machines.pop(machine.host, None)
            connection.close()

    def _serve(self, machine: _Machine) -> None:
        """Process a machine's messages until its connection ends.

        :raises UserError: if it is unsuitable.
        :raises OSError: if it is silent for too long, or sends an unexpected message.
        """
        silence = HeartbeatMonitor[str](joining.BEAT_S, self._missed_beats, start_s=self._start_s)
        silence.expect(machine.host)  # until it has the run's files and has imported what workers need
        name = machine.host  # a machine that returns has another one in the run
        while True:
            wait([machine.connection], joining.BEAT_S)  # type: ignore[list-item]
            silence.look(joining.BEAT_S)
            for text in machine.connection.receive() if wait([machine.connection], 0.0) else ():  # type: ignore[list-item]
                self._process(machine, joining.FROM_MACHINE.validate_json(text))
                if machine.has_joined:
                    silence.receive(name)
            for _, seconds in silence.silent_too_long(lambda _: "unknown"):
                raise OSError(f"silent for {seconds:.1f} s")

    def _process(self, machine: _Machine, message: joining.FromMachine) -> None:
        """Process a message, with the errors of :meth:`_serve`; EOFError if the machine is dismissed."""
        match message:
            case joining.JoinRequest() if not machine.label:
                machine.label = printable(message.called)
                machine.max_workers = message.workers or self._info.workers_per_replica
                self._admit(machine, message)
            case joining.MachineReady() if machine.has_joined:
                pass  # it has returned
            case joining.MachineReady() if machine.max_workers:
                machine.has_joined = True
                self._queue.put(Joined(machine.host, machine.max_workers, machine.label))
            case joining.Started(worker=worker, incarnation=incarnation):
                if WorkerId(worker, incarnation) in machine.workers:  # otherwise it was cancelled
                    self._queue.put(Spawned(worker, incarnation))
            case joining.Failed(worker=worker, incarnation=incarnation, detail=detail):
                if WorkerId(worker, incarnation) in machine.workers:
                    self._queue.put(Lost(worker, incarnation, printable(detail)))
            case joining.Departing(detail=detail) if machine.has_joined and not machine.has_left:
                self._announce_departure(machine, printable(detail))
            case joining.Beat():
                with self._guarded:
                    _send(machine.connection, joining.Beat())
            case joining.InjectFaultRequest(fault=fault) if not machine.label:
                self._queue.put(FaultRequested(fault))
                _send(
                    machine.connection, joining.ConnectionClosing(reason="it will be injected at the next opportunity")
                )
                raise EOFError
            case _:
                raise OSError("unexpected message")

    def _admit(self, machine: _Machine, request: joining.JoinRequest) -> None:
        label = machine.label
        if request.version != planaria.__version__:
            advice = "install the same on both"
            raise UserError(f"{label} has planaria {request.version}, the run {planaria.__version__}: {advice}")
        reachable = not (request.at and no_answer(request.at, self.key))
        with self._guarded:
            if len(self._machines) >= _MAX_MACHINES:
                raise UserError(f"{_MAX_MACHINES} machines have joined already; try again later")
            if self._awaited not in ("", request.called):
                _send(
                    machine.connection,
                    joining.ConnectionClosing(reason=f"{self._awaited} has not joined yet", again=True),
                )
                raise EOFError
            self._awaited = ""
            if self._over:  # it connected just before the port was closed
                if self.closing is not None:
                    _send(machine.connection, self.closing)
                raise EOFError
            if request.returning:
                if request.returning not in self._returning:
                    raise UserError(f"{label}: the run no longer waits for its machine {request.returning}")
                machine.host, machine.has_joined = request.returning, True
                machine.workers = self._returning.pop(request.returning)
            self._machines[machine.host] = machine
        _send(
            machine.connection,
            joining.Welcome(host=machine.host, setup=self._info.setup, cwd=str(Path.cwd()), reachable=reachable),
        )

    def _give_up_returning(self) -> None:
        """Report the loss of machines that have not returned, and of workers that have not."""
        with self._guarded:
            if self._over:
                return
            for host, workers in self._returning.items():
                self._queue.put(Left(host, "did not return"))
                for worker, incarnation in sorted(workers):
                    self._queue.put(Lost(worker, incarnation, f"machine {host} did not return"))
            self._returning.clear()
            for worker, incarnation in sorted(self._expected):
                self._queue.put(Unreturned(worker, incarnation))

    def _announce_departure(self, machine: _Machine, detail: str) -> None:
        """Announce that a machine leaves once its workers have been replaced."""
        with self._guarded:
            machine.has_left = True
            self._queue.put(Left(machine.host, f"leaves ({detail})"))
            for worker, incarnation in sorted(machine.workers):
                self._queue.put(Leaving(worker, incarnation, detail))

    def _remove_machine(self, machine: _Machine, detail: str) -> None:
        """Report the loss of a machine and its workers."""
        if machine.has_joined and not machine.has_left:
            self._queue.put(Left(machine.host, detail))
        machine.has_left = True
        for worker, incarnation in sorted(machine.workers):
            self._queue.put(Lost(worker, incarnation, f"machine {machine.host}: {detail}"))
        machine.workers.clear()
        machine.connection.shut_down()


def _send(connection: ControlConnection, message: joining.ToMachine) -> None:
    if not connection.closed:
        connection.send(message.model_dump_json().encode())


StartLocalFleet = Callable[[str], Fleet]
"""HOST:PORT of the controller's relay → the run's own workers"""


class JoinableFleet:
    """A :class:`planaria.runtime.fleet.base.Elastic` fleet; a worker stays on the machine of its first start."""

    def __init__(
        self,
        start_local: StartLocalFleet,
        config: FleetConfig,
        host: str,
        key: bytes,
        info: RunInvitation,
        folder: Path,
    ) -> None:
        """Machines find the address file in ``folder``, connect to ``host``, prove the ``key``, and receive ``info``.

        The file is written before the run's own workers start, so that machines can check whether they see the folder.
        :raises UserError: if ``fleet.port`` is taken or ``host`` is not an address of this machine.
        """
        machines = partial(JoinedMachines, info=info, config=config)
        self._remote = RemoteFleet(config, host, key, machines, config.port, config.advertise)
        self._machines = self._remote.hosts
        self._keep_address = False
        self._on_machines = {worker for workers in info.returning.values() for worker, _ in workers}
        """workers on joined machines"""
        for worker, incarnation in sorted(name for workers in info.returning.values() for name in workers):
            self._remote.expect_return(worker, incarnation)
        with ExitStack() as cleanup:
            cleanup.callback(self._remote.close, patience_s=0.0)
            self._address_file = publish_run_address(folder, self.address, key, info.folder_id)
            cleanup.callback(self._address_file.unlink, missing_ok=True)
            self._local = start_local(self._remote.control_listener.inside)
            cleanup.pop_all()

    @property
    def address(self) -> str:
        """HOST:PORT that machines join."""
        return self._machines.address

    def spawn(self, worker: str, incarnation: int, host: str = "") -> None:
        if host:
            self._on_machines.add(worker)
            self._machines.expect(worker, host)
        self._fleet_of(worker).spawn(worker, incarnation)

    def remove_machine(self, host: str, reason: str) -> None:
        self._machines.remove_machine(host, reason)

    def announce_restart(self, reason: str) -> None:
        """Let joined machines reconnect after this fleet closes."""
        self._machines.closing = ConnectionClosing(reason=reason, again=True)

    def announce_end(self) -> None:
        """Tell all machines that the run is over, also those that come until this fleet closes."""
        self._machines.close()

    def abandon(self, keep_address: bool = False) -> None:
        """Leave joined machines and their workers to another controller, which they look for immediately.

        :param keep_address: the next one listens at the same address
        """
        self._keep_address = keep_address
        self._machines.closing = None
        self._machines.close()
        self._remote.shut_down()

    def send(self, worker: str, text: bytes) -> None:
        self._fleet_of(worker).send(worker, text)

    def send_to_incarnation(self, worker: str, incarnation: int, text: bytes) -> None:
        self._fleet_of(worker).send_to_incarnation(worker, incarnation, text)

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        self._fleet_of(worker).signal(worker, incarnation, number)

    def waitables(self) -> list[Any]:
        return [*self._local.waitables(), *self._remote.waitables()]

    def poll(self, timeout_s: float) -> list[Notice]:
        wait(self.waitables(), timeout_s)
        return [*self._local.poll(0.0), *self._remote.poll(0.0)]

    def close(self) -> None:
        if not self._keep_address:
            self._address_file.unlink(missing_ok=True)
        self._local.close()
        self._remote.close(0.0 if self._machines.closing is None else 2.0)

    def _fleet_of(self, worker: str) -> Fleet:
        return self._remote if worker in self._on_machines else self._local
