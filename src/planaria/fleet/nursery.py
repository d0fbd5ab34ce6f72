"""A node's nursery: the one process on it that gives birth to its workers, signals them, and takes them with it.

It knows nothing of Ray; ``fleet/ray.py`` makes it an actor. Workers are forked as on a single machine
(``fleet/local.py``), so a birth takes milliseconds wherever a nursery is up.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import platform
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import planaria
from planaria.fleet.base import Entry
from planaria.fleet.birth import be_born, start_server
from planaria.fleet.switchboard import call
from planaria.transport.secure import StrangerError

_FATED = "planaria.fleet.fated"


@dataclass(frozen=True)
class Orders:
    """What every nursery of a run is told once."""

    entry: Entry
    preload: list[str]
    address: str
    """the controller's switchboard"""
    key: bytes = field(repr=False)
    cwd: Path
    """where the controller runs; relative paths of the run start there"""
    folders: tuple[Path, ...]
    """what the workers read and write"""


@dataclass(frozen=True)
class Facts:
    """What a node has; compared with the controller's own before a worker starts there."""

    version: str
    python: str
    missing: tuple[Path, ...]
    """folders of the run that the node cannot see"""


def facts(folders: tuple[Path, ...] = ()) -> Facts:
    """This process's facts."""
    missing = tuple(folder for folder in folders if not folder.is_dir())
    return Facts(planaria.__version__, platform.python_version(), missing)


class Nursery:
    """Its methods may be called from several threads."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._births = orders, threading.Lock()
        self._children: dict[tuple[str, int], mp.process.BaseProcess] = {}
        self._context = mp.get_context("forkserver")
        # Workers would import this process's main program, which is the program that hosts actors.
        vars(sys.modules["__main__"]).pop("__file__", None)
        if not self.facts().missing:
            os.chdir(orders.cwd)
            self._context.set_forkserver_preload([_FATED, *orders.preload])
            start_server()  # by the main thread: the server would die with any other

    def facts(self) -> Facts:
        """What this node has."""
        return facts((self._orders.cwd, *self._orders.folders))

    def ping(self) -> None:
        """Answer: this node is well."""

    def warm_up(self) -> None:
        """Return when births are quick: the fork server has imported all that workers need."""
        first = self._context.Process(target=_do_nothing, daemon=True)
        first.start()
        first.join()

    def start(self, worker: str, incarnation: int) -> int:
        """Fork a worker, which calls the controller by itself; its process id."""
        with self._births:
            for name in [name for name, child in self._children.items() if not child.is_alive()]:
                self._children.pop(name).close()
            child = self._context.Process(
                target=_enter,
                args=(self._orders.entry, self._orders.address, self._orders.key, worker, incarnation),
                name=f"planaria {worker}.{incarnation}",
                daemon=True,
            )
            child.start()
            self._children[worker, incarnation] = child
        assert child.pid is not None
        return child.pid

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        """Deliver a signal; nothing happens if the worker has ended."""
        child = self._children.get((worker, incarnation))
        with contextlib.suppress(ProcessLookupError, ValueError):  # a closed process object: it was buried
            if child is not None and child.pid is not None:
                os.kill(child.pid, number)

    @property
    def empty(self) -> bool:
        """Is no worker left?"""
        return not any(child.is_alive() for child in list(self._children.values()))

    def end(self) -> None:
        """Kill every worker that is left, frozen ones too, and wait for it."""
        with self._births:
            for child in self._children.values():
                child.kill()
            for child in self._children.values():
                child.join(1.0)


def _do_nothing() -> None: ...


def _enter(entry: Entry, address: str, key: bytes, worker: str, incarnation: int) -> None:
    """What a new process runs: call the controller, then be a worker like any other."""
    try:
        connection = call(address, key, worker, incarnation)
    except (OSError, StrangerError):
        os._exit(0)  # the run is over, or has given this birth up
    be_born(entry, connection, worker, incarnation)
