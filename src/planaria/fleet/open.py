"""A fleet that machines may join: the run's own workers, and those of its guests."""

from __future__ import annotations

import signal
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from planaria.config import FleetConfig
from planaria.fleet.base import Fleet, Notice
from planaria.fleet.door import open_door
from planaria.fleet.guests import Guests
from planaria.fleet.remote import Ears, RemoteFleet
from planaria.fleet.switchboard import Switchboard


class OpenFleet:
    """:class:`planaria.fleet.base.Elastic`: an identity that was first spawned on a machine stays there."""

    def __init__(self, home: Fleet, config: FleetConfig, host: str, key: bytes, setup: str, folder: Path) -> None:
        """Guests find the door in ``folder``; they call at ``host``, prove the ``key``, are told the ``setup`` (JSON).

        :raises UserError: when ``fleet.port`` is taken or ``host`` is not an address of this machine.
        """
        silence_s = config.heartbeat_s * config.missed

        def guests(ears: Ears, board: Switchboard) -> Guests:
            self._guests = Guests(ears, board, setup, silence_s)
            return self._guests

        self._home = home
        self._abroad = RemoteFleet(host, config.port, key, config.heartbeat_s, config.missed, guests)
        self._strangers: set[str] = set()
        """workers on machines that have joined"""
        self._door = open_door(folder, self._guests.address, self._guests.key)

    def spawn(self, worker: str, incarnation: int, host: str = "") -> None:
        if host:
            self._strangers.add(worker)
            self._guests.expect(worker, host)
        self._fleet_of(worker).spawn(worker, incarnation)

    def turn_away(self, host: str, reason: str) -> None:
        self._guests.turn_away(host, reason)

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
