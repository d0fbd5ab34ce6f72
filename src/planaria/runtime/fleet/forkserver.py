"""The fork server: a process that has imported what workers need, and forks one per request.

New processes become children of the server's parent: an intermediate process forks them and exits, and the kernel
passes them to the nearest subreaper (``runtime/fleet/spawner.py``). So workers end with the process that requested
them, and survive their server. The intermediate process is forked before a request arrives, so that a start costs one
fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple, NoReturn

from planaria.common.signals import STOPS, ignore
from planaria.config import consent
from planaria.config.consent import Consent
from planaria.runtime.fleet.process import die_with_parent, set_process_name

LENGTH = struct.Struct("!I")
PID = struct.Struct("!i")
READY = b"r"
"""sent to the parent after all imports"""
MAX_REASON = 1000
"""bytes of the reason that is sent instead if an import fails"""
MAX_FDS = 8
_LOOK_S = 0.0005
_PAUSE_S = 0.1
_OVER = 3
"""exit code of an intermediate process after the last request"""


class ForkRequest(NamedTuple):
    """A request to fork a process, pickled by the server's parent and sent on a private socket."""

    name: str
    parent: int
    """process id of the requester"""
    cwd: str
    path: list[str]
    """``sys.path``"""
    run: bytes
    """a pickled callable, called with the received file descriptors except the first"""
    consent: Consent
    """the parent's permission to import modules that a recipe names"""


def main(control_socket: socket.socket, preload: Sequence[str]) -> NoReturn:
    """Serve until the other end closes ``control_socket``. Every worker runs below this call."""
    die_with_parent()
    ignore()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    set_process_name("planaria forks")
    for module in preload:
        try:
            importlib.import_module(module)
        except ImportError:  # reported by the worker that needs it
            continue
        except Exception as error:  # a module may raise anything
            with suppress(OSError):
                control_socket.sendall(
                    f"{module}: {type(error).__name__}: {error}".splitlines()[0].encode()[:MAX_REASON]
                )
            os._exit(1)
    with suppress(OSError):
        control_socket.sendall(READY)
    gc.freeze()  # otherwise a child's first collection copies all shared memory
    code = 0
    while code != _OVER:
        try:
            middle = os.fork()
        except OSError:  # too few processes or too little memory
            time.sleep(_PAUSE_S)
            continue
        if middle == 0:
            _live(*_fork_child(control_socket))
        code = _end_of(middle)
    os._exit(0)


def _end_of(middle: int) -> int:
    """Wait for the intermediate process, killing it if it is stopped; return its exit code."""
    _, status = os.waitpid(middle, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(middle, signal.SIGKILL)
        _, status = os.waitpid(middle, 0)
    return os.waitstatus_to_exitcode(status)


def _fork_child(control_socket: socket.socket) -> tuple[ForkRequest, list[int]]:
    """Wait for a request, fork and exit; return in the child. A failed fork closes the request's socket."""
    die_with_parent()
    request, (leash, *fds) = _receive(control_socket)
    middle = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    control_socket.close()
    while os.getppid() == middle:  # whose exit would kill this process
        time.sleep(_LOOK_S)
    die_with_parent()
    if sys.platform == "linux" and os.getppid() != request.parent:
        os._exit(0)  # the parent has exited
    with socket.socket(fileno=leash) as line, suppress(OSError):
        line.sendall(PID.pack(os.getpid()))
        if line.recv(1):
            return request, fds
    os._exit(0)  # cancelled


def _receive(control_socket: socket.socket) -> tuple[ForkRequest, list[int]]:
    try:
        head, fds, _, _ = socket.recv_fds(control_socket, LENGTH.size, MAX_FDS)
    except ConnectionResetError:  # the parent has exited without reading that this server is ready
        os._exit(_OVER)
    if len(head) < LENGTH.size:
        os._exit(_OVER)
    (length,), body = LENGTH.unpack(head), bytearray()
    while len(body) < length:
        if not (more := control_socket.recv(length - len(body))):
            os._exit(_OVER)
        body += more
    return ForkingPickler.loads(body), fds


def _live(request: ForkRequest, fds: list[int]) -> NoReturn:
    """Run the request, then exit immediately: regular interpreter shutdown takes a second with torch imported."""
    code: object = 1
    try:
        set_process_name(request.name)
        sys.path = request.path
        os.chdir(request.cwd)
        for fd in fds:
            os.set_inheritable(fd, False)
        consent.inherit(request.consent)
        run: Callable[..., None] = ForkingPickler.loads(request.run)
        run(*fds)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:  # no caller would report it
        sys.excepthook(type(error), error, error.__traceback__)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
