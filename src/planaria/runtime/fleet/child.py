"""A process that the fork server starts on request, as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

_LOOK_S = 0.005


class Child:
    """A requested process: not started yet, running, or ended. All methods may be called from several threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid: int | None = None
        """None until it is started"""
        self.failure = ""
        """why it could not be started"""
        self._guarded, self._settled = threading.Lock(), threading.Event()
        self._code: int | None = None
        self._due: list[int] = []

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of the signal that killed it; None while it runs. Reaps the process."""
        with self._guarded:
            if self._code is None and self.pid is not None:
                self._code = _exit_code(self.pid)
            return self._code

    def born(self, patience_s: float | None = None) -> int:
        """Wait until it is started; return the process id.

        :raises OSError: if that fails, or takes longer.
        """
        if not self._settled.wait(patience_s):
            raise TimeoutError(f"{self.name} has not been started within {patience_s:g} s")
        if self.pid is None:
            raise OSError(f"{self.name} could not be started: {self.failure}")
        return self.pid

    def signal(self, number: int) -> None:
        """Send a signal, as soon as the process is started; do nothing if it has ended."""
        with self._guarded:
            if self.pid is None:
                self._due.append(number)
            elif self._code is None:  # until it is reaped, its id is not given to another process
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def join(self, patience_s: float | None = None) -> int | None:
        """Wait for its end; return its exit code, or None if it does not end in time."""
        until = None if patience_s is None else time.monotonic() + patience_s
        while (code := self.exitcode) is None and (until is None or time.monotonic() < until):
            time.sleep(_LOOK_S)
        return code

    def settle(self, pid: int | None, failure: str = "") -> None:
        """Note that it is started, or with ``pid = None`` why it cannot be."""
        with self._guarded:
            self.pid, self.failure = pid, failure
            self._code = None if pid is not None else 1
            due, self._due = self._due, []
        for number in due:
            self.signal(number)
        self._settled.set()

    def kill(self, patience_s: float) -> None:
        """Kill the process and wait for its end; if it is not started yet, kill it then, without waiting."""
        self.signal(signal.SIGKILL)
        if self.pid is not None:
            self.join(patience_s)

    @property
    def wanted(self) -> bool:
        """False once the process was killed before it was started."""
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
