"""What a process of this machine does before it is a worker, so that it outlives nobody."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from multiprocessing import forkserver

from planaria.fleet.base import ControlLine, Entry

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def be_born(entry: Entry, connection: ControlLine, worker: str, incarnation: int) -> None:
    """Become a worker that dies with its parent, and leaves Ctrl-C and the like to the controller."""
    release_server()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    """Start the fork server deaf to Ctrl-C and SIGTERM, as its children are: a terminal or a service manager sends
    these to all processes of a run, and only the controller is to act on them.
    """
    stops = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()  # signal handlers are the main thread's to set
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in stops}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
