"""Control lines over TCP: what a pipe is to a worker of this machine, for workers anywhere.

A worker holds an ordinary ``multiprocessing`` connection and sees no difference. The controller's end never waits for
the rest of a message: a host that vanishes in the middle of one must not stop the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

_GREETING_S = 10
"""a caller that has not said who it is by then is hung up on"""
_SILENT_PEER_S = 30
"""the longest that a worker waits to be heard; what it sends later and nobody acknowledges for so long ends its line,
and with it the worker"""
_SEND_LIMIT_S = 1
_MAX_GREETING_BYTES = 1 << 10
_CHUNK = 1 << 16
_LENGTH = struct.Struct("!i")


VISITOR = 0
"""in place of an incarnation: not a worker calls, but a machine that wants to join"""


class Caller(NamedTuple):
    """Who is at the other end of a line."""

    worker: str
    incarnation: int
    pid: int


class Line:
    """The controller's end of one control line. Messages are bytes, framed as ``Connection`` frames them."""

    def __init__(self, raw: socket.socket, max_bytes: int) -> None:
        self._socket, self._max_bytes, self._bytes = raw, max_bytes, bytearray()
        self._socket.settimeout(_SEND_LIMIT_S)
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, text: bytes) -> None:
        """Send a whole message, or hang up: half of one would garble the next. ``receive`` tells that all is over.

        Fails when the other end is gone, or has not listened for so long that nothing fits between the two.
        """
        try:
            self._socket.sendall(_LENGTH.pack(len(text)) + text)
        except OSError:
            self.hang_up()

    def receive(self) -> list[bytes]:
        """The messages that are complete by now; to be called when something lies ready.

        :raises EOFError: when the other end has hung up.
        :raises OSError: when the connection broke, or what comes is too long to be a report.
        """
        try:
            chunk = os.read(self.fileno(), _CHUNK)  # the socket's own method would wait
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        self._bytes += chunk
        return self._whole()

    def _whole(self) -> list[bytes]:
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if not 0 <= length <= self._max_bytes:
                raise OSError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(bytes(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return messages

    def hang_up(self) -> None:
        """End the line; whoever listens to it hears so."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.closed = True
        self._socket.close()


class Switchboard:
    """Listens for workers that call, and hands over their lines once they have shown that they know the key."""

    def __init__(self, host: str, max_bytes: int, answered: Callable[[Caller, Line], None]) -> None:
        """``answered`` is called in a thread of its own.

        :raises OSError: when ``host`` is not an address of this machine.
        """
        self.key = os.urandom(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=128)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._max_bytes, self._answered = max_bytes, answered
        self.visited: Callable[[Caller, Line], None] = lambda _, line: line.close()
        """called, in a thread of its own, when a machine wants to join; nobody is let in unless this is set"""
        threading.Thread(target=self._serve, name="switchboard", daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                raw, _ = self._server.accept()
                threading.Thread(target=self._greet, args=(raw,), name="greeting", daemon=True).start()

    def _greet(self, raw: socket.socket) -> None:
        """Challenge each other as ``multiprocessing`` does, then hear who calls."""
        raw.settimeout(None)
        _let_wait(raw, _GREETING_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = Connection(os.dup(raw.fileno()))
        try:
            deliver_challenge(greeting, self.key)
            answer_challenge(greeting, self.key)
            caller = Caller(*json.loads(greeting.recv_bytes(_MAX_GREETING_BYTES)))
        except (AuthenticationError, OSError, EOFError, ValueError, TypeError):
            raw.close()  # a stranger, or a worker that died while it called
            return
        finally:
            greeting.close()
        heard = self.visited if caller.incarnation == VISITOR else self._answered
        heard(caller, Line(raw, self._max_bytes))


def call(
    address: tuple[str, int], key: bytes, worker: str, incarnation: int, patience_s: int = _SILENT_PEER_S
) -> Connection:
    """A worker's end of a new line to the controller.

    :raises OSError: when nobody listens at ``address``, or nothing comes from there for ``patience_s``. Without a limit
        the system waits for minutes, and for ever if the network breaks while the two greet each other.
    """
    with socket.create_connection(address, patience_s) as raw:
        raw.settimeout(None)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_PEER_S)
        _let_wait(raw, patience_s)
        connection = Connection(os.dup(raw.fileno()))
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send_bytes(json.dumps(Caller(worker, incarnation, os.getpid())).encode())
        except BlockingIOError:
            raise TimeoutError(f"silent for {patience_s} s") from None
        _let_wait(raw, 0)
    return connection


def _let_wait(raw: socket.socket, seconds: int) -> None:
    """Whoever reads from the socket waits so long at most; 0: for ever."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
