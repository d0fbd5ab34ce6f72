"""A node's process pool: the process that starts and signals the workers of one node; they end with it.

It knows nothing of Ray; ``runtime/fleet/ray.py`` makes it an actor. Workers are forked as on a single machine
(``runtime/fleet/local.py``), so a worker starts in milliseconds wherever a process pool is up.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import threading
from dataclasses import dataclass, field
from functools import partial

import planaria
from planaria.common.errors import UserError
from planaria.config import consent
from planaria.config.consent import NO_CONSENT, Consent
from planaria.runtime.fleet.base import Entry, Settle, Workplace
from planaria.runtime.fleet.devices import NOT_ASKED, ON_CPUS, Inventory, Name, Needs, device_of, inventory, see_only
from planaria.runtime.fleet.process import Child
from planaria.runtime.fleet.spawner import START_S, spawner
from planaria.runtime.fleet.switchboard import call
from planaria.runtime.transport.secure import StrangerError


@dataclass(frozen=True)
class Orders:
    """What every process pool of a run is told once."""

    settle: Settle
    preload: list[str]
    address: str
    """the controller's switchboard"""
    key: bytes = field(repr=False)
    needs: Needs = ON_CPUS
    machine: str = ""
    """the pool's, by its name in the run"""
    consent: Consent = NO_CONSENT
    """the controller's, where its user also started the pool; a machine that joins has only its own"""
    start_s: float = START_S
    """limit for the imports of the fork server, in seconds (fleet.start_timeout_s)"""


@dataclass(frozen=True)
class Facts:
    """What a node has; compared with the controller's own before a worker starts there."""

    version: str
    python: str
    found: Inventory = NOT_ASKED
    """its CUDA devices, where the run needs some"""


def facts(found: Inventory = NOT_ASKED) -> Facts:
    """This process's facts."""
    return Facts(planaria.__version__, platform.python_version(), found)


class ProcessPool:
    """Its methods may be called from several threads."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._guarded = orders, threading.Lock()
        consent.inherit(orders.consent)
        self._children: dict[Name, Child] = {}
        self._homes: dict[Name, str] = {}
        """on which device each of them is"""
        self._found = inventory() if orders.needs.cuda else NOT_ASKED
        self._spawner = spawner()
        self._settling = threading.Lock()
        self._workplace: Workplace | None = None

    def facts(self) -> Facts:
        """What this node has."""
        return facts(self._found)

    def settle(self) -> str:
        """Have the run's files here, which may take as long as fetching them; why that cannot be, empty if it can."""
        try:
            self._settled()
        except UserError as error:
            return str(error)
        return ""

    def ping(self) -> None:
        """Answer: this node is well."""

    def warm_up(self) -> None:
        """Return when workers start quickly: the fork server has imported all that they need."""
        self._spawner.spawn("planaria nobody", _do_nothing, self._orders.preload, start_s=self._orders.start_s).join()

    def start(self, worker: str, incarnation: int, device: str = "") -> int:
        """Have a worker forked, which calls the controller by itself, and wait for the birth; its process id.

        Where the run needs CUDA, it sees one of the node's devices alone: the given one, or one that is chosen here.

        :raises OSError: when nothing can be born here.
        """
        orders = self._orders
        try:
            workplace = self._settled()
        except UserError as error:
            raise OSError(str(error)) from None
        with self._guarded:
            self._children = {name: child for name, child in self._children.items() if child.exitcode is None}
            self._homes = {name: home for name, home in self._homes.items() if name in self._children}
            if self._found.devices:
                device = device or device_of(worker, self._found.devices, self._homes)
            run = partial(_enter, workplace.entry, device, orders.address, orders.key, worker, incarnation)
            called, cwd, limit = f"planaria {worker}.{incarnation}", workplace.cwd, orders.start_s
            child = self._spawner.spawn(called, run, orders.preload, cwd=cwd, start_s=limit)
            self._children[worker, incarnation], self._homes[worker, incarnation] = child, device
        return child.started()

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        """Deliver a signal; nothing happens if the worker has ended."""
        if (child := self._children.get((worker, incarnation))) is not None:
            child.signal(number)

    @property
    def empty(self) -> bool:
        """Is no worker left?"""
        return not any(child.exitcode is None for child in list(self._children.values()))

    def end(self) -> None:
        """Kill every worker that is left, frozen ones too, and wait for it."""
        with self._guarded:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            for child in self._children.values():
                child.kill(1.0)
        if self._workplace is not None and self._workplace.scratch is not None:
            shutil.rmtree(self._workplace.scratch, ignore_errors=True)

    def _settled(self) -> Workplace:
        """:raises UserError: when the run's files cannot be had."""
        orders = self._orders
        with self._settling:
            if self._workplace is None:
                self._workplace = orders.settle(orders.address, orders.machine)
                self._spawner.prepare(orders.preload)
            return self._workplace


def _do_nothing() -> None: ...


def _enter(entry: Entry, device: str, address: str, key: bytes, worker: str, incarnation: int) -> None:
    """What a new process runs: call the controller, then be a worker like any other."""
    if device:
        see_only(device)
    try:
        connection = call(address, key, worker, incarnation)
    except (OSError, StrangerError):
        os._exit(0)  # the run is over, or has given this birth up
    entry(connection, worker, incarnation)
