"""What a process of this machine does before it is a worker, so that it outlives nobody."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from planaria.fleet.base import Entry
from planaria.signals import handled, ignore

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def be_born(entry: Entry, connection: Connection, worker: str, incarnation: int) -> None:
    """Become a worker that dies with its parent, and leaves Ctrl-C, hang-ups and the like to the controller."""
    release_server()
    die_with_parent()
    ignore()
    entry(connection, worker, incarnation)


def release_server() -> None:
    """Close this process's copy of the pipe that keeps the fork server alive.

    The server ends when the last copy closes, and its children with it. With a copy in a frozen worker, both would
    outlive a killed controller for ever.
    """
    alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive is not None:
        with contextlib.suppress(OSError):
            os.close(alive)


def start_server() -> None:
    """Start the fork server deaf to the signals that ask to stop, as its children are: a terminal or a service manager
    sends these to all processes of a run, and only the controller is to act on them.
    """
    with handled(signal.SIG_IGN):
        forkserver.ensure_running()
