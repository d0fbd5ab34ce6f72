"""A listener that passes on connections after their caller has proved the run's key.

Anyone can reach the port. Unproven connections are few and short-lived, the newest replaces the oldest, and an error
ends the connection, not the listener.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from planaria.common.address import host_port
from planaria.common.documents import first_error
from planaria.common.errors import UserError
from planaria.runtime.transport.secure import StrangerError, begin, cut_off, prove, read_exactly

log = logging.getLogger(__name__)
# instead of an incarnation
MACHINE = 0
"""a machine that requests to join, or the run's owner"""
CALLED_FOR = -1
"""an end of an edge for the relay"""
FILES = -2
"""a machine that requests files"""


class ConnectingPeer(NamedTuple):
    """A worker, or another caller as its incarnation indicates."""

    worker: Annotated[str, Field(max_length=1000)]
    incarnation: Annotated[int, Field(ge=FILES, lt=1 << 31)]
    pid: Annotated[int, Field(ge=0, lt=1 << 31)]


_CALLER: TypeAdapter[ConnectingPeer] = TypeAdapter(ConnectingPeer)


def greeting(worker: str, incarnation: int) -> bytes:
    return json.dumps(ConnectingPeer(worker, incarnation, os.getpid())).encode()


def parse_greeting(raw: bytes) -> ConnectingPeer:
    """Return the caller of a greeting; ValueError if it is malformed."""
    try:
        return _CALLER.validate_json(raw, strict=True)
    except ValidationError as error:
        raise ValueError(first_error(error)) from None


GREETING_S = 10.0
"""seconds for a caller to prove the key and send its greeting"""
MAX_UNPROVEN = 32
"""concurrent unproven connections; a proof takes milliseconds, so idle strangers cannot block members"""
MAX_GREETING_BYTES = 1 << 10
PROBE_S = 3.0
"""seconds to wait for a machine that may be unreachable, once when a machine joins"""
_AGAIN_S = 0.05
"""seconds between attempts without a free descriptor"""

OnGreeting = Callable[[bytes, ssl.SSLSocket], None]
"""called with a caller's greeting and connection, in a separate thread"""


class EdgeListener:
    """Listens until :meth:`close`."""

    def __init__(self, host: str, port: int, key: bytes, on_greeting: OnGreeting) -> None:
        """Listen at ``host``:``port`` (0: any free port).

        :raises UserError: if the port is taken or the host is not an address of this machine.
        """
        self._server = _bind(host, port)
        self.host, self.port = self._server.getsockname()[:2]
        self._key, self._on_greeting = key, on_greeting
        self._unproven: dict[ssl.SSLSocket, float] = {}
        self._guarded = threading.Lock()
        self._over = False
        threading.Thread(target=self._serve, name="listener", daemon=True).start()

    @property
    def address(self) -> str:
        """HOST:PORT, where :func:`connect` finds it."""
        return host_port(self.host, self.port)

    def close(self) -> None:
        """Stop listening; connections that were passed on stay."""
        self._over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._guarded:
            strangers = list(self._unproven)
        for stranger in strangers:
            cut_off(stranger)

    def _serve(self) -> None:
        while True:
            try:
                raw, _ = self._server.accept()
            except OSError:
                if self._over:
                    return
                time.sleep(_AGAIN_S)
                continue
            try:
                threading.Thread(target=self._greet, args=(self._begin(raw),), name="greeting", daemon=True).start()
            except (OSError, RuntimeError):  # already broken, or no thread available
                raw.close()

    def _begin(self, raw: socket.socket) -> ssl.SSLSocket:
        """Add a new connection to the unproven ones, closing the oldest if there are too many."""
        stranger = begin(raw, self._key, calling=False)
        with self._guarded:
            if len(self._unproven) >= MAX_UNPROVEN:
                oldest = min(self._unproven, key=self._unproven.__getitem__)
                del self._unproven[oldest]
                cut_off(oldest)
            self._unproven[stranger] = time.monotonic()
        return stranger

    def _greet(self, caller: ssl.SSLSocket) -> None:
        try:
            until = time.monotonic() + GREETING_S
            prove(caller, self._key, GREETING_S)
            length = int.from_bytes(read_exactly(caller, 2, until), "big")
            if length > MAX_GREETING_BYTES:
                raise OSError(f"a greeting of {length} bytes")
            greeting = read_exactly(caller, length, until)
        except (StrangerError, OSError, ValueError) as error:  # ValueError: it was closed meanwhile
            log.debug("rejected a connection to port %d: %s", self.port, cause(error))
            caller.close()
            return
        finally:
            with self._guarded:
                self._unproven.pop(caller, None)
        self._on_greeting(greeting, caller)


def require_free(host: str, port: int) -> None:
    """Raise UserError if a process cannot listen at ``host``:``port`` now."""
    _bind(host, port).close()


@contextlib.contextmanager
def reserved(at: str) -> Iterator[None]:
    """Reserve HOST:PORT for this standby, which listens there only once it leads. Not checked except on Linux.

    :raises UserError: if another standby on this machine has reserved it.
    """
    if sys.platform != "linux":
        yield
        return
    name = hashlib.sha256(at.encode()).hexdigest()
    with socket.socket(socket.AF_UNIX) as reservation:
        try:
            reservation.bind(f"\0planaria standby {name}")  # an abstract name, which is freed with the process
        except OSError:
            raise UserError(f"join --at {at}: another standby on this machine uses this address; stop it") from None
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise UserError(f"fleet.host = {host!r}, fleet.port = {port}: cannot listen there {_fix(error)}") from None


def _fix(error: OSError | OverflowError) -> str:
    """Describe why the system rejects an address, and whether to change the host or the port."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, socket.gaierror) or number in (errno.EADDRNOTAVAIL, errno.EINVAL):
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(number or 0)
        return f"({reason}); set fleet.host to an address of this machine, or to 0.0.0.0 for all, with fleet.advertise"
    if number == errno.EACCES:
        return f"({os.strerror(number)}); choose a port above 1023"
    reason = str(error) if number is None else os.strerror(number)
    return f"({reason}); choose another port, or 0 for any free one"


def listen(host: str, key: bytes, ports: tuple[int, int] | None, on_greeting: OnGreeting) -> EdgeListener:
    """Listen at any free port, or at the first free one from ``ports[0]`` to ``ports[1]``.

    :raises UserError: if the host is not this machine's, or none of the ports is free.
    """
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return EdgeListener(host, port, key, on_greeting)
        except UserError:
            if port == last and ports is None:
                raise
    raise UserError(f"fleet.ports: none of {first} to {last} is free at {host}; use a range with one per worker")


def connect(address: str, key: bytes, greeting: bytes, seconds: float) -> ssl.SSLSocket:
    """Return an authenticated connection to the listener at ``address`` (HOST:PORT), after sending the ``greeting``.

    :raises StrangerError: if the listener does not belong to this run.
    :raises OSError: if the address is invalid, or no listener answers within ``seconds``.
    """
    raw = _connect_once(address, seconds)
    try:
        tls = begin(raw, key, calling=True)
    except OSError:
        raw.close()
        raise
    try:
        prove(tls, key, seconds)
        tls.sendall(len(greeting).to_bytes(2, "big") + greeting)
    except BaseException:
        tls.close()
        raise
    return tls


def _connect_once(address: str, seconds: float) -> socket.socket:
    """Return a connection to ``address``, which another machine may have sent; OSError as :func:`connect`."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), seconds)
    except (ValueError, OverflowError) as error:  # no number, out of range, or no host name
        raise OSError(f"{address[:100]!r} is not HOST:PORT ({error})") from None


def no_answer(address: str, key: bytes, seconds: float = PROBE_S) -> str:
    """Return why this machine gets no answer from the run at ``address`` (HOST:PORT), or an empty string if it gets
    one.
    """
    return _failure(lambda: connect(address, key, b"probe", seconds).close())


def unreachable(address: str, seconds: float = 1.0) -> str:
    """Return why no connection to ``address`` (HOST:PORT) opens, or an empty string if one does; send nothing."""
    failure = _failure(lambda: _connect_once(address, seconds).close())
    return failure and f"cannot connect to {address}: {failure}"


def _failure(attempt: Callable[[], None]) -> str:
    """Return why an attempt fails, or an empty string if it succeeds."""
    try:
        attempt()
    except (OSError, StrangerError) as error:
        return cause(error)
    return ""


def cause(error: Exception) -> str:
    """Return the cause of a connection error in one line."""
    text = getattr(error, "strerror", None) or str(error)
    return str(text).splitlines()[0][:200] if text else type(error).__name__


def has_disconnected(tls: ssl.SSLSocket) -> bool:
    """Return whether an idle end has disconnected; nothing else makes its connection readable. Does not block."""
    try:
        return not socket.socket.recv(tls, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
