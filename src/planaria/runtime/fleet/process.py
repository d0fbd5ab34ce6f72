"""Processes of this machine: ties to their parents, their state in the kernel, and forked children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_CREDENTIALS = struct.Struct("iII")
"""process, user and group of a socket's peer"""
_LOOK_S = 0.005
"""seconds between checks whether a child has ended"""
Activity = Literal["stopped", "busy", "asleep", "unknown"]
"""stopped: no thread may run (SIGSTOP, a debugger); busy: a thread runs, or waits for a processor or disk; asleep: all
threads wait for something else; unknown: it has ended, is on another machine, or the system does not report it
"""


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies.

    The parent is the thread that forked this process, or the main thread of the process that adopted it.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`, and leave the parent's session: signals of its terminal do not arrive."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(0))
    os.setsid()


def set_process_name(name: str) -> None:
    """Set the name of the process in `ps` and `top` (15 bytes)."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


@contextmanager
def adopt_orphans() -> Iterator[None]:
    """Adopt orphans among this process's descendants meanwhile; one thread may use it at a time.

    Use it only while an orphan is expected, since this process must reap all that it adopts.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0))


def _prctl(option: int, value: object) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def peer_pid(line: int) -> int:
    """Return the process at the other end of a Unix socket.

    :param line: its file descriptor
    """
    with socket.socket(fileno=os.dup(line)) as peer:
        pid, _, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid)


def activity(pid: int | None) -> Activity:
    """Return what the threads of a process are doing."""
    states = set() if pid is None else {_state(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")}
    states -= {""}
    if not states or states & set("ZXx"):
        return "unknown"
    if states <= set("Tt"):
        return "stopped"
    return "busy" if states & set("RD") else "asleep"


def _state(stat: Path) -> str:
    """Return a thread's state, one letter, or an empty string if it has ended."""
    try:
        return stat.read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


class WorkerProcess:
    """A requested process: pending, running or ended. Methods are thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid: int | None = None
        """None until it has started"""
        self.failure = ""
        """why it could not be started"""
        self._guarded, self._start_recorded = threading.Lock(), threading.Event()
        self._code: int | None = None
        self._due: list[int] = []

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of the signal that killed it, or None while it runs. Reaps the process."""
        with self._guarded:
            if self._code is None and self.pid is not None:
                self._code = _exit_code(self.pid)
            return self._code

    def wait_until_started(self, patience_s: float | None = None) -> int:
        """Wait until it has started; return the process id.

        :raises OSError: if it fails to start, or takes longer than ``patience_s``.
        """
        if not self._start_recorded.wait(patience_s):
            raise TimeoutError(f"{self.name} has not been started within {patience_s:g} s")
        if self.pid is None:
            raise OSError(f"{self.name} could not be started: {self.failure}")
        return self.pid

    def signal(self, number: int) -> None:
        """Send a signal once the process has started; do nothing if it has ended."""
        with self._guarded:
            if self.pid is None:
                self._due.append(number)
            elif self._code is None:  # its id is not reused until it is reaped
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def join(self, patience_s: float | None = None) -> int | None:
        """Wait for its end; return its exit code, or None after ``patience_s``."""
        until = None if patience_s is None else time.monotonic() + patience_s
        while (code := self.exitcode) is None and (until is None or time.monotonic() < until):
            time.sleep(_LOOK_S)
        return code

    def record_start(self, pid: int | None, failure: str = "") -> None:
        """Record its start, or why it failed (``pid = None``)."""
        with self._guarded:
            self.pid, self.failure = pid, failure
            self._code = None if pid is not None else 1
            due, self._due = self._due, []
        for number in due:
            self.signal(number)
        self._start_recorded.set()

    def kill(self, patience_s: float) -> None:
        """Kill the process and wait for its end; if it has not started, kill it at its start, without waiting."""
        self.signal(signal.SIGKILL)
        if self.pid is not None:
            self.join(patience_s)

    @property
    def wanted(self) -> bool:
        """False after the process was killed before its start."""
        return signal.SIGKILL not in self._due


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child process, or None while it runs."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if reaped else None
    except ChildProcessError:  # not a child of this process, on systems where orphans cannot be adopted
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return 1
        return None
