"""A fleet that machines may join: the run's own workers, and those of its guests.

A guest is a machine that has joined by itself, as the controller sees it; it runs ``runtime/fleet/guest.py``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import planaria
from planaria.common.errors import UserError
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet import joining
from planaria.runtime.fleet.base import Asked, Fleet, Joined, Leaving, Left, Notice
from planaria.runtime.fleet.files import FileServer
from planaria.runtime.fleet.joining import Goodbye, open_door
from planaria.runtime.fleet.remote import Born, Ears, Lost, RemoteFleet
from planaria.runtime.fleet.silence import Silence
from planaria.runtime.fleet.spawner import START_S
from planaria.runtime.fleet.switchboard import Line, Switchboard
from planaria.runtime.transport.listener import Caller, answers

_MANY = 64
"""machines at once; more are asked to come again later"""

Name = tuple[str, int]


@dataclass
class _Guest:
    host: str
    line: Line
    workers: set[Name] = field(default_factory=set)
    joined: bool = False
    left: bool = False


class Guests:
    """Implements :class:`planaria.runtime.fleet.remote.Hosts` for machines that have joined, with a thread for each."""

    def __init__(
        self,
        ears: Ears,
        board: Switchboard,
        setup: str,
        silence_s: float,
        usual: int = 1,
        start_s: float = START_S,
    ) -> None:
        """``setup`` is what a machine must know to start workers, as JSON; ``usual``: workers of one replica;
        ``start_s``: limit for a machine's preparations."""
        self._ears, self._setup, self._silence_s, self._usual = ears, setup, silence_s, usual
        self._start_s = start_s
        self._guests: dict[str, _Guest] = {}
        self._host_of: dict[str, str] = {}
        """worker → where it is, or is to be started"""
        self._numbers = count(1)
        self._guarded = threading.RLock()
        self._over = False
        self.goodbye = joining.Goodbye(reason="the run is over")
        """what machines are told when this closes"""
        self.address, self.key = board.address, board.key
        board.visited = self._receive

    # ---- called by the controller's thread

    def expect(self, worker: str, host: str) -> None:
        """The worker will be started on this machine."""
        self._host_of[worker] = host

    def start(self, worker: str, incarnation: int) -> None:
        with self._guarded:
            guest = self._guests.get(self._host_of[worker])
            if guest is not None and not guest.left:
                guest.workers.add((worker, incarnation))
                _tell(guest.line, joining.Start(worker=worker, incarnation=incarnation))
                return
        self._ears.tell(Lost(worker, incarnation, "its machine has left"))

    def give_back(self, worker: str, incarnation: int) -> None:
        with self._guarded:
            for guest in self._guests.values():
                guest.workers.discard((worker, incarnation))

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        guest = self._guests.get(self._host_of[worker])
        if guest is not None:
            _tell(guest.line, joining.Signal(worker=worker, incarnation=incarnation, number=int(number)))

    def turn_away(self, host: str, reason: str) -> None:
        """Say goodbye to a machine; it takes its workers with it."""
        with self._guarded:
            guest = self._guests.get(host)
            if guest is not None:
                _tell(guest.line, joining.Goodbye(reason=reason, welcome=False))
                self._part(guest, reason)

    def close(self) -> None:
        """The run is over, or as ``goodbye`` says."""
        with self._guarded:
            self._over = True
            for guest in self._guests.values():
                _tell(guest.line, self.goodbye)
                guest.line.hang_up()

    # ---- one thread for each machine

    def _receive(self, caller: Caller, line: Line) -> None:
        guest = _Guest(f"g{next(self._numbers)}", line)
        detail = "its connection closed"
        try:
            self._attend(guest)
        except (EOFError, ConnectionError):
            pass
        except UserError as error:
            detail = str(error)
            _tell(line, joining.Goodbye(reason=detail, welcome=False))
        except (OSError, ValidationError) as error:
            detail = str(error).partition("\n")[0]
        with self._guarded:
            self._part(guest, detail)
            self._guests.pop(guest.host, None)
            line.close()

    def _attend(self, guest: _Guest) -> None:
        """Hear a machine out until its line ends.

        :raises UserError: when it is not fit.
        :raises OSError: when it says nothing for too long, or what it should not.
        """
        called, room = "", 0
        silence = Silence[str](joining.BEAT_S, self._silence_s / joining.BEAT_S, start_s=self._start_s)
        silence.expect(guest.host)  # until it has looked at the run's folders and imported what workers need
        while True:
            wait([guest.line], joining.BEAT_S)  # type: ignore[list-item]
            silence.look(joining.BEAT_S)
            for text in guest.line.receive() if wait([guest.line], 0.0) else ():  # type: ignore[list-item]
                match joining.FROM_GUEST.validate_json(text):
                    case joining.JoinRequest() as request:
                        called, room = _printable(request.called), request.workers or self._usual
                        self._let_in(guest, request, called)
                    case joining.Settled() if room and not guest.joined:
                        guest.joined = True
                        self._ears.tell(Joined(guest.host, room, called))
                    case joining.Started(worker=worker, incarnation=number) if (worker, number) in guest.workers:
                        self._ears.tell(Born(worker, number))
                    case joining.Failed(worker=worker, incarnation=incarnation, detail=detail):
                        if (worker, incarnation) in guest.workers:
                            self._ears.tell(Lost(worker, incarnation, _printable(detail)))
                    case joining.Departing(detail=detail) if guest.joined and not guest.left:
                        self._depart(guest, _printable(detail))
                    case joining.Beat():
                        with self._guarded:
                            _tell(guest.line, joining.Beat())
                    case joining.Strike(fault=fault) if not called:
                        self._ears.tell(Asked(fault))
                        _tell(guest.line, joining.Goodbye(reason="it will strike at the next occasion"))
                        raise EOFError
                    case joining.Started():
                        pass  # given up meanwhile
                    case _:
                        raise OSError("it said what it should not")
                if guest.joined:
                    silence.hear(guest.host)
            for _, seconds in silence.too_long(lambda _: "unknown"):
                raise OSError(f"silent for {seconds:.1f} s")

    def _let_in(self, guest: _Guest, request: joining.JoinRequest, called: str) -> None:
        if request.version != planaria.__version__:
            mend = "install the same on both"
            raise UserError(f"{called} has planaria {request.version}, the run {planaria.__version__}: {mend}")
        reachable = not request.at or answers(request.at, self.key)
        with self._guarded:
            if len(self._guests) >= _MANY:
                raise UserError(f"{_MANY} machines have joined already; come again later")
            if self._over:  # it called just before the port was closed
                _tell(guest.line, self.goodbye)
                raise EOFError
            self._guests[guest.host] = guest
        _tell(guest.line, joining.Welcome(host=guest.host, setup=self._setup, cwd=str(Path.cwd()), reachable=reachable))

    def _depart(self, guest: _Guest, detail: str) -> None:
        """It will go once others have what its workers have."""
        with self._guarded:
            guest.left = True
            self._ears.tell(Left(guest.host, f"leaves ({detail})"))
            for worker, incarnation in sorted(guest.workers):
                self._ears.tell(Leaving(worker, incarnation, detail))

    def _part(self, guest: _Guest, detail: str) -> None:
        """It is gone, and its workers with it."""
        if guest.joined and not guest.left:
            self._ears.tell(Left(guest.host, detail))
        guest.left = True
        for worker, incarnation in sorted(guest.workers):
            self._ears.tell(Lost(worker, incarnation, f"machine {guest.host}: {detail}"))
        guest.workers.clear()
        guest.line.hang_up()


def _tell(line: Line, word: joining.Welcome | joining.Start | joining.Signal | joining.Beat | joining.Goodbye) -> None:
    if not line.closed:
        line.send(word.model_dump_json().encode())


def _printable(text: str) -> str:
    """Strangers must not move a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in text)


Home = Callable[[str], Fleet]
"""The run's own workers; they find the controller's relay at this HOST:PORT."""


@dataclass(frozen=True)
class Told:
    """What machines that join are told."""

    setup: str
    """what they must know to start workers, as JSON"""
    usual: int
    """workers of one replica"""
    sign: str
    """what tells the run's folder from others"""
    files: Mapping[str, Path]
    """folders whose files they may ask for, by the first word of a name"""


class OpenFleet:
    """:class:`planaria.runtime.fleet.base.Elastic`: an identity that was first spawned on a machine stays there."""

    def __init__(self, home: Home, config: FleetConfig, host: str, key: bytes, told: Told, folder: Path) -> None:
        """Guests find the door in ``folder``; they call at ``host``, prove the ``key``, and learn what is ``told``.

        The door is there before the run's own workers are: machines may tell by it that they see the folder.

        :raises UserError: when ``fleet.port`` is taken or ``host`` is not an address of this machine.
        """
        silence_s = config.heartbeat_s * config.missed

        def guests(ears: Ears, board: Switchboard) -> Guests:
            board.asked = FileServer(told.files).serve
            self._guests = Guests(ears, board, told.setup, silence_s, told.usual, config.start_timeout_s)
            self._board = board
            return self._guests

        beats = config.heartbeat_s, config.missed
        self._abroad = RemoteFleet(host, config.port, key, *beats, guests, config.advertise, config.start_timeout_s)
        self._strangers: set[str] = set()
        """workers on machines that have joined"""
        with ExitStack() as unless_all_is_well:
            unless_all_is_well.callback(self._abroad.close, patience_s=0.0)
            self._door = open_door(folder, self._board.address, key, told.sign)
            unless_all_is_well.callback(self._door.unlink, missing_ok=True)
            self._home = home(self._board.inside)
            unless_all_is_well.pop_all()

    def spawn(self, worker: str, incarnation: int, host: str = "") -> None:
        if host:
            self._strangers.add(worker)
            self._guests.expect(worker, host)
        self._fleet_of(worker).spawn(worker, incarnation)

    def turn_away(self, host: str, reason: str) -> None:
        self._guests.turn_away(host, reason)

    def part(self, reason: str) -> None:
        """When it closes, machines that have joined are told to call again."""
        self._guests.goodbye = Goodbye(reason=reason, again=True)

    def send(self, worker: str, text: bytes) -> None:
        self._fleet_of(worker).send(worker, text)

    def dismiss(self, worker: str, incarnation: int, text: bytes) -> None:
        self._fleet_of(worker).dismiss(worker, incarnation, text)

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        self._fleet_of(worker).signal(worker, incarnation, number)

    def ears(self) -> list[Any]:
        return [*self._home.ears(), *self._abroad.ears()]

    def poll(self, timeout_s: float) -> list[Notice]:
        wait(self.ears(), timeout_s)
        return [*self._home.poll(0.0), *self._abroad.poll(0.0)]

    def close(self) -> None:
        self._door.unlink(missing_ok=True)
        self._home.close()
        self._abroad.close()

    def _fleet_of(self, worker: str) -> Fleet:
        return self._abroad if worker in self._strangers else self._home
