"""A fleet that machines may join: the run's own workers, and those of its guests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from planaria.config.schema import FleetConfig
from planaria.runtime.fleet.base import Fleet, Notice
from planaria.runtime.fleet.door import open_door
from planaria.runtime.fleet.files import FileServer
from planaria.runtime.fleet.guests import Guests
from planaria.runtime.fleet.remote import Ears, RemoteFleet
from planaria.runtime.fleet.switchboard import Switchboard
from planaria.runtime.fleet.visit import Goodbye

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
