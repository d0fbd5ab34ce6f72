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

PR_SET_PDEATHSIG = 1


def be_born(entry: Entry, connection: Connection, worker: str, incarnation: int) -> None:
    """Become a worker that dies with its parent, and leaves Ctrl-C and the like to the controller."""
    _release_server()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    entry(connection, worker, incarnation)


def _release_server() -> None:
    """Close this process's copy of the pipe that keeps the fork server alive.

    The server ends when the last copy closes, and its children with it. With a copy in a frozen worker, both would
    outlive a killed controller for ever.
    """
    alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive is not None:
        with contextlib.suppress(OSError):
            os.close(alive)
