"""The protocols between the controller, a fleet of any kind, and the place where its workers are."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from planaria.runtime.fleet.devices import ON_CPUS, Needs

if TYPE_CHECKING:
    from planaria.faults.trace import Fault


MAX_REPORT_BYTES = 1 << 24
"""of a worker's report"""
THAW_LIMIT_S = 60.0
"""a dead incarnation that is silent for so long is killed: nobody will thaw it"""


class Message(BaseModel):
    """Base of the messages on control lines: immutable, of exact types, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ControlLine(Protocol):
    """A worker's end of its line to the controller: a pipe on one machine, or ``switchboard.WorkerLine``."""

    def send_bytes(self, text: bytes, /) -> None:
        """:raises OSError: when the controller is gone."""

    def recv_bytes(self, maxlength: int, /) -> bytes:
        """:raises EOFError: or OSError, when the controller is gone."""


Entry = Callable[[ControlLine, str, int], None]
"""What a worker process runs: (control line, identity, incarnation)."""


@dataclass(frozen=True)
class Said:
    """A worker sent a report (bytes of JSON, bounded in size, not yet parsed)."""

    worker: str
    incarnation: int
    text: bytes


@dataclass(frozen=True)
class Gone:
    """The fleet's death notice: the first of closed connection, ended process, missed heartbeats."""

    worker: str
    incarnation: int
    cause: Literal["connection", "exit", "heartbeat"]
    detail: str


@dataclass(frozen=True)
class Leaving:
    """A worker's machine is about to go; it works on until it is told to leave, or gone."""

    worker: str
    incarnation: int
    detail: str


@dataclass(frozen=True)
class Joined:
    """A machine has joined, with room for so many workers."""

    host: str
    workers: int
    detail: str


@dataclass(frozen=True)
class Left:
    """A machine that had joined takes no more workers; each of those that it has is told of by itself."""

    host: str
    detail: str


@dataclass(frozen=True)
class Asked:
    """The run's owner wants a fault to strike (``planaria chaos``)."""

    fault: Fault


Notice = Said | Gone | Leaving | Joined | Left | Asked


class Fleet(Protocol):
    """Starts workers, carries small messages to and from them, and notices when they die."""

    def spawn(self, worker: str, incarnation: int) -> None:
        """Start a worker process; it reports in when it is ready."""

    def send(self, worker: str, text: bytes) -> None:
        """Hand a message to a worker; a worker that is gone is noticed by ``poll``, not here."""

    def dismiss(self, worker: str, incarnation: int, text: bytes) -> None:
        """Say a last word to an incarnation that counts as dead but speaks again."""

    def poll(self, timeout_s: float) -> list[Notice]:
        """What happened, waiting at most ``timeout_s`` for the first thing. One Gone per incarnation."""

    def ears(self) -> list[Any]:
        """What :func:`multiprocessing.connection.wait` can wait for until ``poll`` has something to tell."""

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        """Deliver a signal to one incarnation of a worker (chaos); nothing happens if it has ended."""

    def close(self) -> None:
        """End every worker that is left, frozen ones too."""


class Elastic(Fleet, Protocol):
    """A fleet that machines may join."""

    def spawn(self, worker: str, incarnation: int, host: str = "") -> None:
        """Start a worker process, on a machine that has joined if ``host`` names one."""

    def turn_away(self, host: str, reason: str) -> None:
        """Send away a machine that has joined, and its workers."""


@dataclass(frozen=True)
class Workplace:
    """What the workers of one machine are started with."""

    entry: Entry
    """importable; called in the worker process"""
    cwd: Path
    scratch: Path | None = None
    """files on their way, of no use once the workers have ended"""


Settle = Callable[[str, str], Workplace]
"""Finds the run's files on the machine that it is called on, or fetches them: (HOST:PORT of the controller, the
machine's name in the run) → what its workers start with. Raises UserError when that cannot be."""


@dataclass(frozen=True)
class Work:
    """What the workers of a run are, wherever they run."""

    entry: Entry
    """importable; called in the worker processes of this machine"""
    preload: list[str]
    """modules that workers are born with"""
    workers: int
    """workers alive at once, spares included"""
    settle: Settle
    """for every other machine; importable"""
    files: Mapping[str, Path]
    """folders whose files other machines may ask for, by the first words of a name"""
    key: bytes = field(repr=False)
    """the run's"""
    needs: Needs = ON_CPUS


class Ground(Protocol):
    """A place for workers."""

    @property
    def host(self) -> str:
        """The address at which the controller can be reached from there."""

    def fleet(self, work: Work) -> Fleet:
        """:raises UserError: when ``work`` cannot be done there."""
