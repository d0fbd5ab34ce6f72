"""Control lines over TCP: what a pipe is to a worker of this machine, for workers anywhere.

A line is TLS from end to end and both ends prove the run's key (``runtime/transport/secure.py``). The worker's end has
the methods of a ``multiprocessing`` connection, so a worker sees no difference. The controller's end never waits for
the rest of a message: a host that vanishes in the middle of one must not stop the others.
"""

from __future__ import annotations

import math
import select
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable

from planaria.runtime.transport.address import Reach, listening
from planaria.runtime.transport.channel import SILENT_PEER_S, Closed, Secured, keep_alive, wait_for
from planaria.runtime.transport.listener import CALLED_FOR, FILES, VISITOR, Caller, Listener, connect, greeted, greeting
from planaria.runtime.transport.relay import Relay
from planaria.runtime.transport.secure import prepare

_ANSWER_S = 30
"""the longest that a worker waits to be heard"""
_SEND_LIMIT_S = 1.0
_CHUNK = 1 << 16
MAX_ORDER_BYTES = 1 << 20
_LENGTH = struct.Struct("!i")


class Line:
    """The controller's end of one control line. Messages are bytes behind four bytes of length."""

    def __init__(self, channel: Secured, max_bytes: int) -> None:
        self._channel, self._max_bytes, self._bytes = channel, max_bytes, bytearray()
        self._chunk = bytearray(_CHUNK)
        self.closed = False

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, text: bytes) -> None:
        """Send a whole message, or hang up: half of one would garble the next. ``receive`` tells that all is over.

        Fails when the other end is gone, or has not listened for so long that nothing fits between the two.
        """
        try:
            self._send(text, _SEND_LIMIT_S)
        except (OSError, ValueError):
            self.hang_up()

    def receive(self) -> list[bytes]:
        """The messages that are complete by now; to be called when something lies ready.

        :raises EOFError: when the other end has hung up.
        :raises OSError: when the connection broke, or what comes is too long to be a report.
        """
        try:
            while got := self._channel.read_some(memoryview(self._chunk)):
                self._bytes += self._chunk[:got]
                if len(self._bytes) > self._max_bytes + _CHUNK:
                    break  # the rest lies ready next time; a length that is too large is told below
        except Closed:
            if not (messages := self._whole()):
                raise EOFError from None
            return messages
        return self._whole()

    def hang_up(self) -> None:
        """End the line; whoever listens to it hears so."""
        self._channel.hang_up()

    def close(self) -> None:
        self.closed = True
        self._channel.close()

    def _send(self, text: bytes, patience_s: float) -> None:
        self._channel.write(memoryview(_LENGTH.pack(len(text)) + text), patience_s=patience_s)

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


class WorkerLine(Line):
    """A worker's end: one thread listens, and waits for as long as it takes; others send, one at a time."""

    def __init__(self, channel: Secured, max_bytes: int, own_address: str) -> None:
        super().__init__(channel, max_bytes)
        self.own_address = own_address
        """of this machine on the way to the controller: others of the run can reach it there"""
        self._ready: deque[bytes] = deque()

    def send_bytes(self, text: bytes) -> None:
        """:raises OSError: when the line is dead, or nobody listens at the other end."""
        self._send(text, SILENT_PEER_S)

    def poll(self, patience_s: float | None = 0.0) -> bool:
        """Is there a message, after waiting for it for so long at most?

        :raises EOFError: when the other end has hung up.
        """
        until = math.inf if patience_s is None else time.monotonic() + patience_s
        while not self._ready:
            self._ready.extend(self.receive())
            # What has come may be a part of a message, or of a record.
            if self._ready or not wait_for(self._channel, select.POLLIN, until - time.monotonic()):
                break
        return bool(self._ready)

    def recv_bytes(self, maxlength: int = MAX_ORDER_BYTES) -> bytes:
        """The next message; one of more than ``maxlength`` bytes ends the line.

        :raises EOFError: when the other end has hung up.
        """
        self._max_bytes = maxlength
        self.poll(None)
        return self._ready.popleft()


class Switchboard:
    """Listens for all that call the controller, and hands over their lines once they have shown that they know the key.

    One port is enough: workers, machines that join, those that ask for files, and ends of edges that only meet here.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        max_bytes: int,
        answered: Callable[[Caller, Line], None],
        advertise: str = "",
    ) -> None:
        """``answered`` is called in a thread of its own; others find this machine at ``advertise``, or at ``host``.

        :raises UserError: when the port is taken or ``host`` is not an address of this machine.
        """
        self.key, self._max_bytes, self._answered = key, max_bytes, answered
        self.visited: Callable[[Caller, Line], None] = lambda _, line: line.close()
        """called, in a thread of its own, when a machine wants to join; nobody is let in unless this is set"""
        self.asked: Callable[[WorkerLine], None] = lambda line: line.close()
        """called, in a thread of its own, when a machine asks for files"""
        self._relay = Relay()
        prepare(key)
        self._listener = Listener(host, port, key, self._greeted)
        at = listening(self._listener.host, self._listener.port, Reach(advertise=advertise))
        self.inside, self.address = at.inside, at.outside
        """HOST:PORT for this machine's own processes, and for those of others"""

    def close(self) -> None:
        self._listener.close()
        self._relay.close()

    def _greeted(self, words: bytes, tls: ssl.SSLSocket) -> None:
        try:
            caller = greeted(words)
        except ValueError:
            tls.close()
            return
        keep_alive(tls)
        match caller.incarnation:
            case incarnation if incarnation == CALLED_FOR:
                self._relay.meet(caller.worker, tls)
            case incarnation if incarnation == FILES:
                self.asked(WorkerLine(Secured(tls), MAX_ORDER_BYTES, str(tls.getsockname()[0])))
            case incarnation if incarnation == VISITOR:
                self.visited(caller, Line(Secured(tls), self._max_bytes))
            case _:
                self._answered(caller, Line(Secured(tls), self._max_bytes))


def call(address: str, key: bytes, worker: str, incarnation: int, patience_s: float = _ANSWER_S) -> WorkerLine:
    """A worker's end of a new line to the controller.

    :raises StrangerError: when whoever listens there does not know the key.
    :raises OSError: when nobody listens at ``address``, or nothing comes from there for ``patience_s``. Without a limit
        the system waits for minutes, and for ever if the network breaks while the two greet each other.
    """
    prepare(key)
    tls = connect(address, key, greeting(worker, incarnation), patience_s)
    keep_alive(tls)
    own_address = str(tls.getsockname()[0])
    return WorkerLine(Secured(tls), MAX_ORDER_BYTES, own_address)
