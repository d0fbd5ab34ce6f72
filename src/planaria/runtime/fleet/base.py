"""Protocols between the controller, a fleet of any kind, and the host of its workers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from planaria.runtime.fleet.devices import ON_CPUS, DeviceNeeds

if TYPE_CHECKING:
    from planaria.faults.trace import Fault


MAX_REPORT_BYTES = 1 << 24
"""maximum size of a worker's report, bytes"""
THAW_LIMIT_S = 60.0
"""a dead incarnation that stays silent this long is killed"""


class Message(BaseModel):
    """Base of messages on control connections: immutable, strictly typed, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


MAX_ORDER_BYTES = 1 << 20
"""maximum size of an order to a worker"""


class WorkerConnection(Protocol):
    """A worker's end of its control connection: a pipe, or ``control_connections.BlockingConnection``."""

    def send_bytes(self, text: bytes, /) -> None:
        """Send a message; OSError if the controller has exited."""

    def recv_bytes(self, maxlength: int, /) -> bytes:
        """Receive a message; EOFError or OSError if the controller has exited."""


Entry = Callable[[WorkerConnection, str, int], None]
"""main function of a worker process: (control connection, worker, incarnation)"""


@dataclass(frozen=True)
class Reported:
    """A report of a worker: JSON of bounded size, not parsed yet."""

    worker: str
    incarnation: int
    text: bytes
    number: int = 0
    """number of a notice that a supervisor delivers once, to one controller or the next; 0: not counted"""


@dataclass(frozen=True)
class WorkerEnded:
    """A worker's end, from the first of: closed connection, exited process, missed heartbeats."""

    worker: str
    incarnation: int
    cause: Literal["connection", "exit", "heartbeat"]
    detail: str
    number: int = 0
    """number of the notice, as in :class:`Reported`"""


@dataclass(frozen=True)
class Leaving:
    """A worker's machine is about to leave; it works until ordered to leave, or until the machine exits."""

    worker: str
    incarnation: int
    detail: str


@dataclass(frozen=True)
class Joined:
    """A machine has joined, with room for ``workers``."""

    host: str
    workers: int
    detail: str


@dataclass(frozen=True)
class Left:
    """A machine that had joined takes no more workers; its workers are reported separately."""

    host: str
    detail: str


@dataclass(frozen=True)
class FaultRequested:
    """The run's owner requests a fault (``planaria run chaos``)."""

    fault: Fault


Notice = Reported | WorkerEnded | Leaving | Joined | Left | FaultRequested


class Fleet(Protocol):
    """Starts workers, exchanges small messages with them, and detects their end."""

    def spawn(self, worker: str, incarnation: int) -> None:
        """Start a worker process, which reports when it is ready."""

    def send(self, worker: str, text: bytes) -> None:
        """Send a message to a worker; ``poll`` reports a worker that has exited."""

    def send_to_incarnation(self, worker: str, incarnation: int, text: bytes) -> None:
        """Send a last message to an incarnation that counts as dead but still reports."""

    def poll(self, timeout_s: float) -> list[Notice]:
        """Return new notices, waiting at most ``timeout_s`` for the first; one :class:`WorkerEnded` per incarnation."""

    def waitables(self) -> list[Any]:
        """Objects for :func:`multiprocessing.connection.wait` that signal new notices."""

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        """Send a signal to an incarnation (for chaos); do nothing if it has ended."""

    def close(self) -> None:
        """End all remaining workers, including stopped ones."""


class Elastic(Fleet, Protocol):
    """A fleet that machines can join."""

    def spawn(self, worker: str, incarnation: int, host: str = "") -> None:
        """Start a worker process, on the joined machine ``host`` if given."""

    def remove_machine(self, host: str, reason: str) -> None:
        """Dismiss a machine that has joined, and its workers."""


@dataclass(frozen=True)
class Workplace:
    """Where and how the workers of a machine start."""

    entry: Entry
    """importable main function of the workers"""
    cwd: Path
    scratch: Path | None = None
    """temporary files, removed after the workers have ended"""


PrepareWorkplace = Callable[[str, str], Workplace]
"""(HOST:PORT of the controller, the machine's name in the run) → how its workers start. Finds or fetches the run's
files on the machine; UserError if that fails.
"""


@dataclass(frozen=True)
class FleetWork:
    """The workers of a run, independent of where they run."""

    entry: Entry
    """importable main function of the workers on this machine"""
    preload: list[str]
    """modules that workers are forked with"""
    workers: int
    """largest number of living workers, including spares"""
    prepare_workplace: PrepareWorkplace
    """importable function that prepares the workplace of every other machine"""
    files: Mapping[str, Path]
    """folders served to other machines, by the first part of a file's name"""
    key: bytes = field(repr=False)
    """key of the run"""
    needs: DeviceNeeds = ON_CPUS


class WorkerHost(Protocol):
    """A host for workers: this machine or a cluster."""

    @property
    def host(self) -> str:
        """Address at which workers reach the controller."""

    def fleet(self, work: FleetWork) -> Fleet:
        """Return a fleet; UserError if the host is unsuitable for ``work``."""
