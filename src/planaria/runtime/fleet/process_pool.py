"""The process pool of a node, which starts and signals its workers; they end with it.

It does not depend on Ray; ``runtime/fleet/ray.py`` makes it an actor. Workers are forked as in
``runtime/fleet/local.py``, so that a start takes milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import planaria
from planaria.common import atomic
from planaria.common.errors import UserError
from planaria.config import consent
from planaria.config.consent import NO_CONSENT, Consent
from planaria.config.names import WorkerId
from planaria.runtime.fleet.base import Entry, PrepareWorkplace, Workplace
from planaria.runtime.fleet.control_connections import ANSWER_S, BlockingConnection, call
from planaria.runtime.fleet.devices import (
    NO_INVENTORY,
    ON_CPUS,
    DeviceNeeds,
    Inventory,
    device_of,
    inventory,
    use_only,
)
from planaria.runtime.fleet.failover_connection import FailoverConnection
from planaria.runtime.fleet.process import WorkerProcess
from planaria.runtime.fleet.spawner import START_S, spawner
from planaria.runtime.transport.secure import StrangerError

MOVE = signal.SIGUSR1
"""sent to workers, to leave the controller whose address is in the pool's file; others ignore it"""
_REDIAL_S = 2.0
"""seconds for the answer of a controller that may lead"""


@dataclass(frozen=True)
class PoolConfiguration:
    """Configuration of a run's process pools."""

    prepare_workplace: PrepareWorkplace
    preload: list[str]
    address: str
    """address of the controller"""
    key: bytes = field(repr=False)
    needs: DeviceNeeds = ON_CPUS
    machine: str = ""
    """the pool's name in the run"""
    consent: Consent = NO_CONSENT
    """the controller's, if the same user started the pool; a joined machine has only its own"""
    start_s: float = START_S
    """limit for the imports of the fork server, in seconds (fleet.start_timeout_s)"""
    standbys: tuple[str, ...] = ()
    """HOST:PORT of controllers that may lead next"""
    orphan_s: float = 0.0
    """seconds that workers wait for one of them"""


@dataclass(frozen=True)
class NodeFacts:
    """Properties of a node, compared with the controller's before a worker starts there."""

    version: str
    devices: Inventory = NO_INVENTORY
    """its CUDA devices, if the run needs some"""


class ProcessPool:
    """Starts and signals the workers of a node. Methods are thread-safe."""

    def __init__(self, config: PoolConfiguration) -> None:
        self._config, self._guarded = config, threading.Lock()
        consent.inherit(config.consent)
        self._children: dict[WorkerId, WorkerProcess] = {}
        self._homes: dict[WorkerId, str] = {}
        """device of each worker"""
        self._found = inventory() if config.needs.cuda else NO_INVENTORY
        self._spawner = spawner()
        self._preparing = threading.Lock()
        self._workplace: Workplace | None = None
        self.address = config.address
        """address of the controller that leads, to which new workers connect"""
        self._scratch = tempfile.TemporaryDirectory(prefix="planaria-pool-")
        self._left = Path(self._scratch.name) / "left"
        """file with the address of the controller that workers are to leave"""

    def facts(self) -> NodeFacts:
        """Return the facts of this node."""
        return NodeFacts(planaria.__version__, self._found)

    def fetch_files(self) -> str:
        """Find or fetch the run's files; return why that failed, or an empty string if it succeeded."""
        try:
            self._prepare_workplace()
        except UserError as error:
            return str(error)
        return ""

    def ping(self) -> None:
        """Return, to show that the node is alive."""

    def warm_up(self) -> None:
        """Wait until the fork server has imported what workers need."""
        self._spawner.spawn("planaria warm-up", _do_nothing, self._config.preload, start_s=self._config.start_s).join()

    def start(self, worker: str, incarnation: int, device: str = "") -> int:
        """Fork a worker, which connects to the controller; return its process id.

        If the run needs CUDA, the worker sees only the given device of the node, or one that is chosen here.
        :raises OSError: if no worker can start here.
        """
        config = self._config
        try:
            workplace = self._prepare_workplace()
        except UserError as error:
            raise OSError(str(error)) from None
        with self._guarded:
            self._children = {key: child for key, child in self._children.items() if child.exitcode is None}
            self._homes = {key: home for key, home in self._homes.items() if key in self._children}
            if self._found.devices:
                device = device or device_of(worker, self._found.devices, self._homes)
            standbys = tuple(at for at in config.standbys if at != self.address)
            controllers = _Controllers((self.address, *standbys), config.key, config.orphan_s)
            use_device = partial(use_only, device, self._found.devices)
            run = partial(_enter, controllers, self._left, workplace.entry, use_device, worker, incarnation)
            child = self._spawner.spawn(
                f"planaria {worker}.{incarnation}", run, config.preload, cwd=workplace.cwd, start_s=config.start_s
            )
            key = WorkerId(worker, incarnation)
            self._children[key], self._homes[key] = child, device
        return child.wait_until_started()

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        """Send a signal; do nothing if the worker has ended."""
        if (child := self._children.get(WorkerId(worker, incarnation))) is not None:
            child.signal(number)

    def leave(self, address: str) -> None:
        """Let workers that are still connected to the controller there, perhaps a silent one, look for another."""
        atomic.write_text(self._left, address)
        for child in list(self._children.values()):
            child.signal(MOVE)

    @property
    def empty(self) -> bool:
        """Whether no worker is left."""
        return not any(child.exitcode is None for child in list(self._children.values()))

    def end(self) -> None:
        """Kill and reap all remaining workers, including stopped ones."""
        with self._guarded:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            for child in self._children.values():
                child.kill(1.0)
        if self._workplace is not None and self._workplace.scratch is not None:
            shutil.rmtree(self._workplace.scratch, ignore_errors=True)
        self._scratch.cleanup()

    def _prepare_workplace(self) -> Workplace:
        """Return the workplace; UserError if the run's files are unavailable."""
        config = self._config
        with self._preparing:
            if self._workplace is None:
                self._workplace = config.prepare_workplace(config.address, config.machine)
                self._spawner.prepare(config.preload)
            return self._workplace


def _do_nothing() -> None: ...


@dataclass(frozen=True)
class _Controllers:
    """The controllers of a run, for a worker: the first leads, others may later."""

    addresses: tuple[str, ...]
    key: bytes = field(repr=False)
    orphan_s: float


def _enter(
    controllers: _Controllers,
    left: Path,
    entry: Entry,
    use_device: Callable[[], None],
    worker: str,
    incarnation: int,
) -> None:
    """Connect to the controller in a new process, and run the worker."""
    signal.signal(MOVE, signal.SIG_IGN)
    use_device()

    def dial(address: str, patience_s: float = _REDIAL_S) -> BlockingConnection:
        return call(address, controllers.key, worker, incarnation, patience_s)

    try:
        connection = dial(controllers.addresses[0], ANSWER_S)
    except (OSError, StrangerError):
        os._exit(0)  # the run is over, or has cancelled this start
    if controllers.orphan_s:
        failover = FailoverConnection(connection, dial, controllers.addresses, controllers.orphan_s)
        signal.signal(MOVE, lambda *_: failover.leave(left.read_text()))
        entry(failover, worker, incarnation)
    entry(connection, worker, incarnation)
