"""A fleet whose workers call the controller from wherever they are; to start them is somebody else's work."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from planaria.runtime.fleet.base import MAX_REPORT_BYTES, THAW_LIMIT_S, Asked, Gone, Joined, Leaving, Left, Notice, Said
from planaria.runtime.fleet.silence import Silence
from planaria.runtime.fleet.spawner import START_S
from planaria.runtime.fleet.switchboard import Line, Switchboard
from planaria.runtime.transport.listener import Caller


class Hosts(Protocol):
    """Starts and ends processes elsewhere. No method blocks but ``close``."""

    def start(self, worker: str, incarnation: int) -> None:
        """Have a worker born; what comes of it is told to the ears given at the beginning."""

    def give_back(self, worker: str, incarnation: int) -> None:
        """This incarnation counts as dead: its place may be another's."""

    def signal(self, worker: str, incarnation: int, number: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Born:
    """A host has started the process; it has not called yet."""

    worker: str
    incarnation: int


@dataclass(frozen=True)
class Lost:
    """A host knows that a worker is gone, or was never born, or must go."""

    worker: str
    incarnation: int
    detail: str


News = Born | Lost | Leaving | Joined | Left | Asked | tuple[Caller, Line]
"""what a host tells, or a worker that calls"""


@dataclass(eq=False)
class _Worker:
    worker: str
    incarnation: int
    heard: float | None = None
    """None until its host has started it: waiting for a machine may take as long as it takes"""
    line: Line | None = None
    pid: int | None = None
    gone: bool = False


@dataclass
class Ears:
    """What other threads put in for the controller's thread to find at its next ``poll``."""

    heard: SimpleQueue[News] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self.bell, self._cord = socket.socketpair()
        self.bell.setblocking(False)
        self._cord.setblocking(False)

    def tell(self, news: News) -> None:
        """Put something in and wake the listener."""
        self.heard.put(news)
        with contextlib.suppress(OSError):  # the bell rings already, or nobody listens any more
            self._cord.send(b"!")

    def take(self) -> list[News]:
        """All that was put in."""
        news: list[News] = []
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(1 << 12)
        with contextlib.suppress(Empty):
            while True:
                news.append(self.heard.get_nowait())
        return news

    def close(self) -> None:
        self.bell.close()
        self._cord.close()


class RemoteFleet:
    """The fleet protocol over TCP lines. The first of closed line, host's word and silence is the death notice."""

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        heartbeat_s: float,
        missed: int,
        hosts: Callable[[Ears, Switchboard], Hosts],
        advertise: str = "",
        start_s: float = START_S,
    ) -> None:
        """Listen at ``host`` for those who know the ``key``; ``hosts`` learns where workers are to call, and whom to
        tell what becomes of them. ``start_s``: limit for a worker's start.

        :raises UserError: when the port is taken or ``host`` is not an address of this machine.
        """
        self._silence: Silence[_Worker] = Silence(heartbeat_s, missed, start_s=start_s)
        self._ears = Ears()
        self._switchboard = Switchboard(
            host, port, key, MAX_REPORT_BYTES, lambda *call: self._ears.tell(call), advertise
        )
        self._workers: dict[str, _Worker] = {}
        self._everyone: list[_Worker] = []
        try:
            self._hosts = hosts(self._ears, self._switchboard)
        except BaseException:
            self._switchboard.close()
            self._ears.close()
            raise

    def spawn(self, worker: str, incarnation: int) -> None:
        self._bury()
        self._workers[worker] = _Worker(worker, incarnation)
        self._everyone.append(self._workers[worker])
        self._hosts.start(worker, incarnation)

    def send(self, worker: str, text: bytes) -> None:
        self._tell(self._workers[worker], text)

    def dismiss(self, worker: str, incarnation: int, text: bytes) -> None:
        zombie = self._find(worker, incarnation)
        if zombie is not None:
            self._tell(zombie, text)

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        if self._find(worker, incarnation) is not None:
            self._hosts.signal(worker, incarnation, number)

    def ears(self) -> list[Any]:
        return [self._ears.bell, *(w.line for w in self._everyone if w.line is not None and not w.line.closed)]

    def poll(self, timeout_s: float) -> list[Notice]:
        lines = {w.line: w for w in self._everyone if w.line is not None and not w.line.closed}
        notices: list[Notice] = []
        wait([self._ears.bell, *lines], timeout_s)  # type: ignore[list-item]
        self._silence.look(timeout_s)
        ready = wait([self._ears.bell, *lines], 0.0)  # type: ignore[list-item]
        for news in self._ears.take():
            notices += self._heed(news)
        for line in ready:
            if line is not self._ears.bell:
                notices += self._read(lines[line])  # type: ignore[index]
        for worker, seconds in self._silence.too_long(lambda _: "unknown"):
            notices += self._lose(worker, Gone(*_name(worker), "heartbeat", f"silent for {seconds:.2f} s"))
        return notices

    def _heed(self, news: News) -> list[Notice]:
        match news:
            case Leaving() | Joined() | Left() | Asked():
                return [news]
            case Born():
                born = self._find(news.worker, news.incarnation)
                if born is not None and born.heard is None:
                    self._await(born)
            case Lost():
                lost = self._find(news.worker, news.incarnation)
                if lost is not None:
                    return self._lose(lost, Gone(*_name(lost), "exit", news.detail))
            case caller, line:
                answered = self._find(caller.worker, caller.incarnation)
                if answered is None or answered.line is not None:
                    line.close()  # its birth was given up meanwhile
                else:
                    answered.line, answered.pid = line, caller.pid
                    self._await(answered)
        return []

    def _await(self, worker: _Worker) -> None:
        """It is there, and will speak."""
        worker.heard = time.monotonic()
        if not worker.gone:
            self._silence.expect(worker)

    def _read(self, worker: _Worker) -> list[Notice]:
        """Everything that lies ready on one line."""
        assert worker.line is not None
        try:
            texts = worker.line.receive()
        except (EOFError, OSError):
            worker.line.close()
            return self._lose(worker, Gone(*_name(worker), "connection", f"pid {worker.pid}"))
        if texts:
            worker.heard = time.monotonic()
            if not worker.gone:
                self._silence.hear(worker)
        return [Said(*_name(worker), text) for text in texts]

    def _lose(self, worker: _Worker, notice: Gone) -> list[Notice]:
        """The notice, unless one was given before."""
        if worker.gone:
            return []
        worker.gone = True
        self._silence.forget(worker)
        self._hosts.give_back(worker.worker, worker.incarnation)
        return [notice]

    def _tell(self, worker: _Worker, text: bytes) -> None:
        if worker.line is not None and not worker.line.closed:
            worker.line.send(text)

    def _bury(self) -> None:
        """Forget dead incarnations, and end those frozen for so long that nobody will thaw them."""
        for worker in [w for w in self._everyone if w.gone]:
            if worker.line is None or worker.line.closed:
                self._everyone.remove(worker)
            elif worker.heard is not None and time.monotonic() - worker.heard > THAW_LIMIT_S:
                self._hosts.signal(worker.worker, worker.incarnation, signal.SIGKILL)

    def _find(self, worker: str, incarnation: int) -> _Worker | None:
        return next((w for w in self._everyone if _name(w) == (worker, incarnation)), None)

    def close(self, patience_s: float = 2.0) -> None:
        """Give workers that were told to leave the time to do so, then end what is left."""
        deadline = time.monotonic() + patience_s
        while any(not w.gone for w in self._everyone) and (left := deadline - time.monotonic()) > 0:
            self.poll(left)
        self._hosts.close()
        self._switchboard.close()
        for worker in self._everyone:
            if worker.line is not None:
                worker.line.close()
        self._ears.close()


def _name(worker: _Worker) -> tuple[str, int]:
    return worker.worker, worker.incarnation
