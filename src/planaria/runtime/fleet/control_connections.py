"""Control connections over TCP, for workers on any machine.

A connection is TLS between ends that have proved the run's key (``runtime/transport/secure.py``). The worker's end has
the methods of a ``multiprocessing`` connection. The controller's end never waits for the rest of a message, so that a
vanished host cannot block the others.
"""

from __future__ import annotations

import math
import select
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable

from planaria.common.address import Reach, listening
from planaria.runtime.fleet.base import MAX_ORDER_BYTES
from planaria.runtime.transport.channel import SILENT_PEER_S, ChannelClosed, SecureChannel, keep_alive, wait_for
from planaria.runtime.transport.listener import (
    CALLED_FOR,
    FILES,
    MACHINE,
    ConnectingPeer,
    EdgeListener,
    connect,
    greeting,
    parse_greeting,
)
from planaria.runtime.transport.relay import Relay
from planaria.runtime.transport.secure import prepare

ANSWER_S = 30
"""seconds that a worker waits for an answer"""
_SEND_LIMIT_S = 1.0
_CHUNK = 1 << 16
_LENGTH = struct.Struct("!i")


class ControlConnection:
    """The controller's end of a control connection. Messages have a four-byte length."""

    def __init__(self, channel: SecureChannel, max_bytes: int) -> None:
        self._channel = channel
        self._max_bytes = max_bytes
        self._bytes = bytearray()
        self._chunk = bytearray(_CHUNK)
        self.closed = False

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, text: bytes) -> None:
        """Send a whole message, or close the connection; ``receive`` then reports that.

        Fails if the other end has exited, or reads so slowly that the buffers are full.
        """
        try:
            self._send(text, _SEND_LIMIT_S)
        except (OSError, ValueError):
            self.shut_down()

    def receive(self) -> list[bytes]:
        """Return the complete messages. Call it when data is ready.

        :raises EOFError: if the other end has closed the connection.
        :raises OSError: if the connection broke, or a message is too long.
        """
        try:
            while got := self._channel.read_some(memoryview(self._chunk)):
                self._bytes += self._chunk[:got]
                if len(self._bytes) > self._max_bytes + _CHUNK:
                    break  # the rest is read next time; an excessive length is rejected below
        except ChannelClosed:
            if not (messages := self._whole()):
                raise EOFError from None
            return messages
        return self._whole()

    def shut_down(self) -> None:
        """Shut the connection down; readers see its end."""
        self._channel.shut_down()

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


class BlockingConnection(ControlConnection):
    """The end of a worker or another caller: one thread receives without time limit; others send, one at a time."""

    def __init__(self, channel: SecureChannel, max_bytes: int, own_address: str) -> None:
        super().__init__(channel, max_bytes)
        self.own_address = own_address
        """address of this machine on the route to the controller, for other machines of the run"""
        self._ready: deque[bytes] = deque()

    def send_bytes(self, text: bytes) -> None:
        """Send a message; OSError if the connection is dead, or the other end does not read."""
        self._send(text, SILENT_PEER_S)

    def poll(self, patience_s: float | None = 0.0) -> bool:
        """Return whether a message is available, after waiting at most ``patience_s``.

        :raises EOFError: if the other end has closed the connection.
        """
        until = math.inf if patience_s is None else time.monotonic() + patience_s
        while not self._ready:
            self._ready.extend(self.receive())
            # Data that arrived may be part of a message or record.
            if self._ready or not wait_for(self._channel, select.POLLIN, until - time.monotonic()):
                break
        return bool(self._ready)

    def recv_bytes(self, maxlength: int = MAX_ORDER_BYTES) -> bytes:
        """Return the next message; a longer one than ``maxlength`` ends the connection.

        :raises EOFError: if the other end has closed the connection.
        """
        self._max_bytes = maxlength
        self.poll(None)
        return self._ready.popleft()


class ControlListener:
    """Accepts connections to the controller, and passes on those that have proved the key.

    One port serves workers, machines that join, requests for files, and edges that are relayed here.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        max_bytes: int,
        answered: Callable[[ConnectingPeer, ControlConnection], None],
        advertise: str = "",
    ) -> None:
        """``answered`` is called in a new thread per connection; other machines reach this one at ``advertise``, or at
        ``host``.

        :raises UserError: if the port is taken or ``host`` is not an address of this machine.
        """
        self.key = key
        self._max_bytes = max_bytes
        self._answered = answered
        self.on_join: Callable[[ConnectingPeer, ControlConnection], None] = lambda _, connection: connection.close()
        """called in a new thread when a machine wants to join; by default all are rejected"""
        self.on_file_request: Callable[[BlockingConnection], None] = lambda connection: connection.close()
        """called in a new thread when a machine requests files"""
        self._relay = Relay()
        prepare(key)
        self._listener = EdgeListener(host, port, key, self._route_connection)
        at = listening(self._listener.host, self._listener.port, Reach(advertise=advertise))
        self.inside, self.address = at.inside, at.outside
        """HOST:PORT for processes of this machine, and for other machines"""

    def close(self) -> None:
        self._listener.close()
        self._relay.close()

    def _route_connection(self, text: bytes, tls: ssl.SSLSocket) -> None:
        try:
            peer = parse_greeting(text)
        except ValueError:
            tls.close()
            return
        keep_alive(tls)
        match peer.incarnation:
            case incarnation if incarnation == CALLED_FOR:
                self._relay.pair(peer.worker, tls)
            case incarnation if incarnation == FILES:
                self.on_file_request(BlockingConnection(SecureChannel(tls), MAX_ORDER_BYTES, str(tls.getsockname()[0])))
            case incarnation if incarnation == MACHINE:
                self.on_join(peer, ControlConnection(SecureChannel(tls), self._max_bytes))
            case _:
                self._answered(peer, ControlConnection(SecureChannel(tls), self._max_bytes))


def call(address: str, key: bytes, worker: str, incarnation: int, patience_s: float = ANSWER_S) -> BlockingConnection:
    """Open a worker's control connection.

    :raises StrangerError: if the other end does not know the key.
    :raises OSError: if there is no answer at ``address`` within ``patience_s``. Without a limit, the system waits for
        minutes, or forever if the network breaks during the handshake.
    """
    prepare(key)
    tls = connect(address, key, greeting(worker, incarnation), patience_s)
    keep_alive(tls)
    own_address = str(tls.getsockname()[0])
    return BlockingConnection(SecureChannel(tls), MAX_ORDER_BYTES, own_address)
