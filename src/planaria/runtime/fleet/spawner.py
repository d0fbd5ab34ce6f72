"""Process starts that do not block the caller: a thread sends requests to the fork server.

A server (``runtime/fleet/forkserver.py``) that is dead or stuck is replaced, and the request repeated. New processes
become children of this process: they survive their server, and end with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
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

from planaria.common.signals import STOPS
from planaria.config import consent
from planaria.runtime.fleet.forkserver import LENGTH, MAX_REASON, PID, READY, ForkRequest, main
from planaria.runtime.fleet.process import WorkerProcess, activity, adopt_orphans

log = logging.getLogger(__name__)
_FORK_S = 10.0
"""limit for the start of one process; milliseconds are usual"""
START_S = 120.0
"""default limit for the server's imports (fleet.start_timeout_s)"""
_BUSY_TIMES = 6
"""factor for these limits if the server works or waits for a processor"""
_LOOK_S = 0.5
_END_S = 1.0
"""limit for the server to reap its own child and exit, before it is killed"""
_TRIES = 3
_PAUSE_S = 0.1
_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""lets modules check for CUDA at import without initialising it, which would break forks"""
_PROGRAM = (
    "import socket, sys; control_socket, preload, *sys.path = sys.argv[1:]; from "
    "planaria.runtime.fleet.forkserver import main; "
    "main(socket.socket(fileno=int(control_socket)), preload.split())"
)


@dataclass
class _Task:
    preload: frozenset[str]
    child: WorkerProcess | None = None
    """None: start no process, but let the server import the modules"""
    request: bytes = b""
    fds: Sequence[int] = ()
    start_s: float = START_S

    def fail(self, failure: str) -> None:
        if self.child is not None:
            self.child.record_start(None, failure)
        for fd in self.fds:  # the reader of the other end sees it close
            os.close(fd)


class _NotReadyError(TimeoutError):
    """The fork server did not finish its imports in time."""


class _NotImportedError(OSError):
    """The fork server exited because an import failed."""


class _Server:
    """A fork server, as seen by its parent."""

    def __init__(
        self, preload: frozenset[str], start: Callable[[socket.socket, frozenset[str]], WorkerProcess]
    ) -> None:
        """Start it from a thread that lives as long as this process, since the server ends with that thread.

        ``start``: :func:`_spawn` or :func:`_fork`.
        :raises OSError: if it cannot be started.
        """
        self.preload, self._ready = preload, False
        self._control_socket, theirs = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until it ignores them
        try:
            with theirs:
                self._process = start(theirs, preload)
        except OSError:
            self._control_socket.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def alive(self) -> bool:
        return self._process.exitcode is None

    def get_ready(self, start_s: float) -> None:
        """Wait until the server has imported what workers need.

        :raises _NotReadyError: if that takes longer than ``start_s``, or several times as long on a busy machine.
        :raises OSError: if the server has exited; a _NotImportedError if it sent the reason.
        """
        if self._ready:
            return
        self._await(self._control_socket, start_s)
        failure = "the fork server exited while it imported what workers need"
        answer = self._control_socket.recv(MAX_REASON)
        if not answer:
            raise OSError(failure)
        if answer != READY:
            raise _NotImportedError(f"{failure} ({answer.decode(errors='replace')})")
        self._ready = True

    def fork(self, request: bytes, fds: Sequence[int], started: Callable[[int], None]) -> None:
        """Fork a process; ``started`` is called with its id before the process does anything.

        :raises OSError: if no process was forked; a TimeoutError if the server is stuck.
        """
        lifetime_socket, theirs = socket.socketpair()
        with lifetime_socket:
            with theirs:
                self._control_socket.settimeout(_FORK_S)
                socket.send_fds(self._control_socket, [LENGTH.pack(len(request))], [theirs.fileno(), *fds])
                self._control_socket.sendall(request)
            self._await(lifetime_socket, _FORK_S)
            answer = lifetime_socket.recv(PID.size)
            if len(answer) < PID.size:
                raise OSError("the fork server is dead, or cannot fork")
            started(*PID.unpack(answer))
            with contextlib.suppress(OSError):  # if it died immediately, its parent sees that
                lifetime_socket.sendall(b"!")

    def _await(self, line: socket.socket, limit_s: float) -> None:
        """Wait for an answer on ``line``. Counts looks instead of time, which passes while this process is stopped.

        :raises TimeoutError: if no answer comes; a _NotReadyError if the server was importing.
        """
        for look in count(1):
            if wait([line], min(_LOOK_S, limit_s)):
                return
            doing, waited = activity(self._process.wait_until_started()), look * min(_LOOK_S, limit_s)
            late = waited > limit_s * (_BUSY_TIMES if doing == "busy" else 1)
            if late and not self._ready:
                raise _NotReadyError(
                    f"the fork server has not imported what workers need within {limit_s:g} s ({doing}); on a slow "
                    "disk or with a cold cache, raise fleet.start_timeout_s"
                )
            if late or doing == "stopped":
                raise TimeoutError(f"the fork server is stuck ({doing}, no answer for {waited:g} s)")

    def end(self, patience_s: float = 0.0) -> None:
        """Reap the server, and kill it if it does not exit within ``patience_s``."""
        self._control_socket.close()
        if self._process.join(patience_s) is None:
            self._process.kill(1.0)


def _spawn(control_socket: socket.socket, preload: frozenset[str]) -> WorkerProcess:
    """Start a server as a new interpreter; OSError if that fails."""
    command = [sys.executable, "-P", "-c", _PROGRAM, str(control_socket.fileno()), " ".join(sorted(preload)), *_path()]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=[control_socket.fileno()], env={**os.environ, **_NO_CUDA}
    )
    process.returncode = 0  # WorkerProcess reaps the process, not Popen
    return _as_child(process.pid)


def _fork(control_socket: socket.socket, preload: frozenset[str]) -> WorkerProcess:
    """Fork a server from this process. It shares the imported modules, and no file descriptor but ``control_socket``.

    :raises OSError: if that fails.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return _as_child(pid)
    try:
        if getattr(sys.modules["torch"]._C, "_cuda_isInBadFork", bool)():
            os._exit(1)  # this process has initialised CUDA: its forks could not use it
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.closerange(3, control_socket.fileno())
        os.closerange(control_socket.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        main(control_socket, sorted(preload))
    finally:
        os._exit(1)


def _as_child(pid: int) -> WorkerProcess:
    server = WorkerProcess("planaria forks")
    server.record_start(pid)
    return server


class Spawner:
    """Sends requests to the fork server of this process, one at a time, in a separate thread."""

    def __init__(self, server: _Server | None = None) -> None:
        """``server``: started by a thread that lives as long as this process."""
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._server, self._ended = server, False
        threading.Thread(target=self._work, name="spawner", daemon=True).start()

    def prepare(self, preload: Sequence[str]) -> None:
        """Let the server import modules, for quicker starts later."""
        self._tasks.put(_Task(frozenset(preload)))

    def spawn(
        self,
        name: str,
        run: Callable[..., None],
        preload: Sequence[str] = (),
        fds: Sequence[int] = (),
        cwd: Path | None = None,
        start_s: float = START_S,
    ) -> WorkerProcess:
        """Start a process that calls ``run``, which must be importable, with ``fds``, and exits. Returns immediately.

        ``cwd``: its working directory (default: this process's); ``start_s``: limit for the server's imports. The file
        descriptors are closed here as soon as the process has them, or failed to start.
        """
        child = WorkerProcess(name)
        pickled, location = bytes(ForkingPickler.dumps(run)), str((cwd or Path.cwd()).absolute())
        request = ForkRequest(name, os.getpid(), location, _path(), pickled, consent.current_consent())
        self._tasks.put(_Task(frozenset(preload), child, bytes(ForkingPickler.dumps(request)), fds, start_s))
        return child

    def end(self) -> None:
        """Start no more processes, and reap the fork server."""
        self._ended = True
        if (server := self._server) is not None:
            server.end(_END_S)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                failure = self._deliver(task)
            except _NotReadyError as error:  # other tasks would wait as long for the same imports
                failure = str(error)
                with contextlib.suppress(Empty):
                    while True:
                        self._tasks.get_nowait().fail(failure)
            if failure:
                task.fail(failure)
            else:
                for fd in task.fds:
                    os.close(fd)

    def _deliver(self, task: _Task) -> str:
        """Start a process; return why that failed, empty if it succeeded.

        :raises _NotReadyError: if the server needs too long for its imports.
        """
        failure = unimported = ""
        for attempt in range(_TRIES):
            if self._ended or (task.child is not None and not task.child.wanted):
                return "it was cancelled"
            try:
                server = self._fork_server(task.preload)
                if task.child is not None:
                    server.get_ready(task.start_s)
                if unimported:
                    log.warning("%s; another one was started", unimported)
                    unimported = ""
                if task.child is not None:
                    with adopt_orphans():
                        server.fork(task.request, task.fds, task.child.record_start)
                return ""
            except OSError as error:
                if isinstance(error, TimeoutError | _NotImportedError) and self._server is not None:
                    self._server.end()  # processes it forks later exit
                    self._server = None
                if isinstance(error, _NotReadyError):
                    raise
                failure = str(error)
                unimported = failure if isinstance(error, _NotImportedError) else unimported
                time.sleep(_PAUSE_S * (1 + attempt))  # the server may be exiting, or the machine out of processes
        return failure

    def _fork_server(self, preload: frozenset[str]) -> _Server:
        """Return a live server that imports these modules; OSError if there is none and none can be started."""
        old, self._server = self._server, None
        if old is None or not old.alive or not preload <= old.preload:
            if old is not None:
                try:
                    if not old.alive:
                        old.get_ready(_LOOK_S)  # raises the reason, if it has sent one
                finally:
                    old.end()
                preload |= old.preload
            old = _Server(preload, _spawn)
            log.debug("started a fork server")
        self._server = old
        return old


def _path() -> list[str]:
    return [str(Path(entry).absolute()) for entry in sys.path]


_own: list[tuple[int, Spawner]] = []
_starting = threading.Lock()
_forkable: list[int] = []
"""id of this process while :func:`fork_server` may fork it"""
_added: list[str] = []
"""variables that :func:`expect_fork` has set for that time"""


def expect_fork() -> None:
    """Declare that this process only imports modules until it calls :func:`fork_server`.

    Call it before torch is imported, which asks some GPU drivers for devices.
    """
    _added[:] = _NO_CUDA.keys() - os.environ.keys()
    os.environ.update(_NO_CUDA)
    _forkable[:] = [os.getpid()]


def fork_server(preload: Sequence[str]) -> None:
    """Fork this process's fork server now, if that is safe, so that workers share the modules imported here.

    It is safe on Linux, in a process that :func:`expect_fork` has declared, that has no second Python thread and has
    not initialised CUDA. Otherwise the first worker starts a new interpreter. Without ``preload`` nothing is forked.
    """
    if _forkable != [os.getpid()]:
        return
    _forkable.clear()
    if preload and sys.platform == "linux" and "torch" in sys.modules and not _own and threading.active_count() == 1:
        with contextlib.suppress(OSError):
            _own[:] = [(os.getpid(), Spawner(_Server(frozenset(preload), _fork)))]
    for name in _added:
        os.environ.pop(name, None)


@atexit.register
def _end() -> None:
    """Reap this process's fork server, which would otherwise remain a zombie."""
    if _own and _own[0][0] == os.getpid():
        _own[0][1].end()


def spawner() -> Spawner:
    """Return this process's spawner, so that torch is imported once for all its fleets."""
    with _starting:
        if not _own or _own[0][0] != os.getpid():  # a fork does not inherit threads
            _own[:] = [(os.getpid(), Spawner())]
        return _own[0][1]
