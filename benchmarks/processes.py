"""Processes that benchmarks start and watch: commands, descendants, memory, and pairs of processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from planaria.common.errors import RunStopped


def cli(*words: object) -> list[str]:
    """Return a command line of planaria."""
    return [sys.executable, "-m", "planaria", *map(str, words)]


def flags(settings: Mapping[str, object]) -> list[str]:
    """Return the flags of a command line that set these settings."""
    return [word for setting, value in settings.items() for word in (f"--{setting}", str(value))]


def descendants(pid: int) -> list[int]:
    """Return a process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has exited
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:  # grows meanwhile
        found += children.get(one, [])
    return found


def memory(pid: int | str, field: str = "VmHWM") -> int:
    """Return a field of a process's memory in bytes, by default its peak; 0 after its end."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0


def alive(pid: int) -> bool:
    """Return True for a running process, False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children() -> frozenset[int]:
    """Return this process's children, zombies included."""
    lists = Path("/proc/self/task").glob("*/children")
    return frozenset(int(pid) for file in lists for pid in file.read_text().split())


def reap_children(others: frozenset[int], patience_s: float = 10.0) -> bool:
    """Wait for all children but ``others``, so that their time counts; return False if any is left."""
    until = time.monotonic() + patience_s
    while left := children() - others:
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # another thread has waited for it
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def wait_until(what: str, condition: Callable[[], bool], seconds: float = 120.0, pause: float = 0.02) -> None:
    """Poll a condition.

    :raises RunStopped: if it does not hold within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RunStopped(f"no {what} within {seconds:g} s")
        time.sleep(pause)


_PORTS = range(20000, 30000)
"""below the ports that Linux gives to outgoing connections, which could take a free one before its listener opens"""
_given = set[int]()


def free_port() -> int:
    """Return a free port, never one twice; processes of one test run that work in parallel get different ones."""
    among, own = 8, int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in random.sample(_PORTS[own % among :: among], 200):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in _given:
                _given.add(port)
                return port
    raise OSError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free")


Both = Callable[..., tuple[Any, Any]]
"""(method, its arguments) → the results of both ends"""


@contextmanager
def two_ends(make: Callable[..., Any], *given: Any) -> Iterator[tuple[Any, Both]]:
    """Yield ``make(0, pipe, *given)`` and a function that calls a method of it and of its other end at once.

    The other end is ``make(1, pipe, *given)`` in a process of its own; the pipe connects both.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_obey, args=(theirs, make, given), daemon=True)
    process.start()
    try:
        end = make(0, ours, *given)

        def both(method: str, *arguments: Any) -> tuple[Any, Any]:
            ours.send((method, arguments))
            return getattr(end, method)(*arguments), ours.recv()

        yield end, both
    finally:
        ours.send(None)
        process.join(5)


def _obey(orders: Connection, make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    end = make(1, orders, *given)
    while (order := orders.recv()) is not None:
        method, arguments = order
        orders.send(getattr(end, method)(*arguments))
