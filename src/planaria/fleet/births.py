"""Births on this machine: who wants a process does not wait for it, and what lives does not depend on what bore it.

One thread asks the fork server (``fleet/forkserver.py``). A server that is dead or stuck is replaced, and the birth
repeated there. Newborns become this process's own children, so they survive their server, and die with this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import Empty, SimpleQueue

from planaria import consent
from planaria.fleet.activity import activity
from planaria.fleet.birth import adopting
from planaria.fleet.forkserver import LENGTH, PID, READY, Request
from planaria.signals import STOPS

_BIRTH_S = 10.0
"""how long a birth may take; milliseconds are usual"""
START_S = 120.0
"""how long the server may take to import what workers need, unless a recipe says otherwise (fleet.start_timeout_s)"""
_BUSY_TIMES = 6
"""how many times as long if the server is not asleep, but works or waits for a processor"""
_LOOK_S = 0.5
_TRIES = 3
_PAUSE_S = 0.1
_JOIN_LOOK_S = 0.005
_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""a module that asks, when it is imported, whether there is CUDA must not initialise it: forks could not use it then"""
_PROGRAM = (
    "import socket, sys; door, preload, *sys.path = sys.argv[1:]; from planaria.fleet.forkserver import main; "
    "main(socket.socket(fileno=int(door)), preload.split())"
)


class Child:
    """A process that has been asked for: to be born, alive, or over. Its methods may be called from several threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid: int | None = None
        """None until it is born"""
        self.failure = ""
        """why it never will be"""
        self._guarded, self._settled = threading.Lock(), threading.Event()
        self._code: int | None = None
        self._due: list[int] = []

    @property
    def exitcode(self) -> int | None:
        """None while it lives or is not born yet; negative: the signal that killed it. Asking buries the dead."""
        with self._guarded:
            if self._code is None and self.pid is not None:
                self._code = _exit_code(self.pid)
            return self._code

    def born(self, patience_s: float | None = None) -> int:
        """Wait for the birth; the process id.

        :raises OSError: when it failed, or takes longer.
        """
        if not self._settled.wait(patience_s):
            raise TimeoutError(f"{self.name} has not been born within {patience_s:g} s")
        if self.pid is None:
            raise OSError(f"{self.name} could not be born: {self.failure}")
        return self.pid

    def signal(self, number: int) -> None:
        """Deliver a signal, to one that is not born yet as soon as it is; nothing happens if it has ended."""
        with self._guarded:
            if self.pid is None:
                self._due.append(number)
            elif self._code is None:  # as long as nobody has buried it, its id is nobody else's
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def join(self, patience_s: float | None = None) -> int | None:
        """Wait for its end; its exit code, None when it does not end in time."""
        until = None if patience_s is None else time.monotonic() + patience_s
        while (code := self.exitcode) is None and (until is None or time.monotonic() < until):
            time.sleep(_JOIN_LOOK_S)
        return code

    def settle(self, pid: int | None, failure: str = "") -> None:
        """It is born, or never will be."""
        with self._guarded:
            self.pid, self.failure = pid, failure
            self._code = None if pid is not None else 1
            due, self._due = self._due, []
        for number in due:
            self.signal(number)
        self._settled.set()

    def kill(self, patience_s: float) -> None:
        """Kill the process and wait for its end; one that has not started is killed at its start, unattended."""
        self.signal(signal.SIGKILL)
        if self.pid is not None:
            self.join(patience_s)

    @property
    def wanted(self) -> bool:
        """False once the process was killed before it was started."""
        return signal.SIGKILL not in self._due


def _exit_code(pid: int) -> int | None:
    """None while the process lives."""
    try:
        buried, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if buried else None
    except ChildProcessError:  # not a child of this process, on systems where orphans cannot be adopted
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return 1
        return None


@dataclass
class _Birth:
    preload: frozenset[str]
    child: Child | None = None
    """None: nobody is to be born, the server is to get ready"""
    request: bytes = b""
    fds: Sequence[int] = ()
    start_s: float = START_S

    def fail(self, failure: str) -> None:
        if self.child is not None:
            self.child.settle(None, failure)
        for fd in self.fds:  # the reader of the other end sees it close, and looks for the reason
            os.close(fd)


class _NotReadyError(TimeoutError):
    """The fork server has not imported what workers need in time."""


class _Server:
    """One fork server, as its parent sees it."""

    def __init__(self, preload: frozenset[str]) -> None:
        """Start it, by the thread that will stay: the server dies with that thread.

        :raises OSError: when it cannot be started.
        """
        self.preload, self._ready = preload, False
        self._door, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), " ".join(sorted(preload)), *_path()]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until it ignores them by itself
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ, **_NO_CUDA}
                )
        except OSError:
            self._door.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def get_ready(self, start_s: float) -> None:
        """Wait until the server has imported what workers need.

        :raises _NotReadyError: if that takes longer than ``start_s``, or several times as long on a busy machine.
        :raises OSError: if the server has exited.
        """
        if self._ready:
            return
        self._await(self._door, start_s)
        if not self._door.recv(len(READY)):
            raise OSError("the fork server exited while it imported what workers need")
        self._ready = True

    def bear(self, request: bytes, fds: Sequence[int], born: Callable[[int], None]) -> None:
        """Fork a process; ``born`` is called with its id before the process does anything.

        :raises OSError: if no process was forked; a TimeoutError if the server is stuck.
        """
        leash, theirs = socket.socketpair()
        with leash:
            with theirs:
                self._door.settimeout(_BIRTH_S)
                socket.send_fds(self._door, [LENGTH.pack(len(request))], [theirs.fileno(), *fds])
                self._door.sendall(request)
            self._await(leash, _BIRTH_S)
            said = leash.recv(PID.size)
            if len(said) < PID.size:
                raise OSError("the fork server is dead, or cannot fork")
            born(*PID.unpack(said))
            with contextlib.suppress(OSError):  # it died at once; whoever wants it will hear
                leash.sendall(b"!")

    def _await(self, line: socket.socket, limit_s: float) -> None:
        """Wait for an answer on ``line``. Counts looks, not time: a stop of this process is not the server's fault.

        :raises TimeoutError: if no answer comes; it is a _NotReadyError if the server was still importing.
        """
        for look in count(1):
            if wait([line], min(_LOOK_S, limit_s)):
                return
            doing, waited = activity(self._process.pid), look * min(_LOOK_S, limit_s)
            late = waited > limit_s * (_BUSY_TIMES if doing == "busy" else 1)
            if late and not self._ready:
                raise _NotReadyError(
                    f"the fork server has not imported what workers need within {limit_s:g} s ({doing}); on a slow "
                    "disk or with a cold cache, raise fleet.start_timeout_s"
                )
            if late or doing == "stopped":
                raise TimeoutError(f"the fork server is stuck ({doing}, no answer for {waited:g} s)")

    def end(self) -> None:
        self._door.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)


class Births:
    """Asks the fork server of this process, one birth after the other, in a thread of its own."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Birth] = SimpleQueue()
        self._server: _Server | None = None
        threading.Thread(target=self._work, name="births", daemon=True).start()

    def prepare(self, preload: Sequence[str]) -> None:
        """Let the server import what will be needed; births are quick then."""
        self._asked.put(_Birth(frozenset(preload)))

    def bear(
        self,
        name: str,
        run: Callable[..., None],
        preload: Sequence[str] = (),
        fds: Sequence[int] = (),
        cwd: Path | None = None,
        start_s: float = START_S,
    ) -> Child:
        """Start a process that calls ``run``, which must be importable, with ``fds``, and exits. Returns at once.

        ``cwd``: its working directory (default: this process's); ``start_s``: limit for the server's imports. The file
        descriptors are closed here as soon as the process has them, or failed to start.
        """
        child = Child(name)
        pickled, place = bytes(ForkingPickler.dumps(run)), str((cwd or Path.cwd()).absolute())
        request = Request(name, os.getpid(), place, _path(), pickled, consent.current())
        self._asked.put(_Birth(frozenset(preload), child, bytes(ForkingPickler.dumps(request)), fds, start_s))
        return child

    def _work(self) -> None:
        while True:
            birth = self._asked.get()
            try:
                failure = self._deliver(birth)
            except _NotReadyError as error:  # the same imports would keep the others waiting as long, one by one
                failure = str(error)
                with contextlib.suppress(Empty):
                    while True:
                        self._asked.get_nowait().fail(failure)
            if failure:
                birth.fail(failure)
            else:
                for fd in birth.fds:
                    os.close(fd)

    def _deliver(self, birth: _Birth) -> str:
        """Start a process; return why that failed, or nothing.

        :raises _NotReadyError: if the server needs too long for its imports.
        """
        failure = ""
        for attempt in range(_TRIES):
            if birth.child is not None and not birth.child.wanted:
                return "it was given up"
            try:
                server = self._serving(birth.preload)
                if birth.child is not None:
                    server.get_ready(birth.start_s)
                    with adopting():
                        server.bear(birth.request, birth.fds, birth.child.settle)
                return ""
            except OSError as error:
                if isinstance(error, TimeoutError) and self._server is not None:
                    self._server.end()  # what it has forked meanwhile finds nobody who wants it
                if isinstance(error, _NotReadyError):
                    raise
                failure = str(error)
                time.sleep(_PAUSE_S * (1 + attempt))  # the server may be dying, or the machine short of processes
        return failure

    def _serving(self, preload: frozenset[str]) -> _Server:
        """A server that lives and has imported these modules, as far as anybody knows.

        :raises OSError: when there is none and none can be started.
        """
        old, self._server = self._server, None
        if old is None or not old.alive or not preload <= old.preload:
            if old is not None:
                old.end()
                preload |= old.preload
            old = _Server(preload)
        self._server = old
        return old


def _path() -> list[str]:
    return [str(Path(entry).absolute()) for entry in sys.path]


_own: list[tuple[int, Births]] = []
_starting = threading.Lock()


def births() -> Births:
    """This process's: torch is imported once, however many fleets a process has."""
    with _starting:
        if not _own or _own[0][0] != os.getpid():  # a fork has none of its parent's threads
            _own[:] = [(os.getpid(), Births())]
        return _own[0][1]
