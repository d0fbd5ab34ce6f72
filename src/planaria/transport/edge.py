"""One pipeline edge: one connection, a thread that receives, and a thread that sends what does not fit at once.

What arrives, and what goes wrong, lands in an inbox beside everything else that the worker listens to, so the main
thread never waits for an edge. An edge that is given up says goodbye behind all that was sent before, and closes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from planaria.transport.buffers import as_bytes, receive_buffer
from planaria.transport.channel import Channel, Closed
from planaria.transport.port import Port, Unmet
from planaria.transport.wire import HEADER_BYTES, Content, Header, WireError, pack, unpack

_GOODBYE = memoryview(pack(Header(Content.BYE, 0, 0, 0, 0, torch.uint8, (0,))))


@dataclass(frozen=True)
class EdgeSpec:
    """Which edge, and what it may carry. ``peer`` is the node at the other end.

    The end that is given an address (``at``) calls there; the other waits to be called.
    """

    link_id: str
    at: str
    peer: int
    max_bytes: int
    open_timeout_s: float
    latency_s: float = 0.0
    bandwidth: float | None = None


@dataclass(frozen=True)
class Opened:
    """The other end is there; ``seconds`` since the edge was asked for."""

    edge: Edge
    seconds: float


@dataclass(frozen=True)
class Arrived:
    """A checked frame."""

    edge: Edge
    header: Header
    payload: Tensor


@dataclass(frozen=True)
class Broken:
    """The edge is of no more use; said once."""

    edge: Edge
    detail: str


class Edge:
    """A full-duplex edge. All methods are called by the worker's main thread."""

    def __init__(self, spec: EdgeSpec, port: Port, inbox: SimpleQueue[Any]) -> None:
        self.spec = spec
        self.sent_bytes = 0
        self.hold_s, self.hold_until = 0.0, 0.0
        """a fault: each frame that arrives is held for so long, until then (monotonic seconds)"""
        self._port, self._inbox = port, inbox
        self._outbox: SimpleQueue[tuple[memoryview, memoryview] | None] = SimpleQueue()
        self._sending = threading.Lock()
        self._queued = 0
        """frames that the sending thread has still to send"""
        self._channel: Channel | None = None
        self._abandoned = False
        threading.Thread(target=self._open, name=f"open {spec.link_id}", daemon=True).start()

    def send(self, header: Header, payload: Tensor) -> None:
        """Send a frame, or queue what does not fit at once; the payload must not change until it has left."""
        self.sent_bytes += header.nbytes
        first, second = memoryview(pack(header)), as_bytes(payload.contiguous())
        try:
            with self._sending:  # never held while the sending thread waits
                sent = 0 if self._channel is None or self._queued else self._channel.write_now(first, second)
                if sent == len(first) + len(second):
                    return
                self._queued += 1
        except OSError:
            return  # the receiving thread finds out whether it broke or the other end said goodbye
        self._outbox.put((first[sent:], second[max(0, sent - len(first)) :]))

    def abandon(self) -> None:
        """Stop reporting; say goodbye to the other end, behind what was sent before, if it can still hear it."""
        self._abandoned = True
        self._outbox.put(None)
        self._port.look_up()

    def reset(self) -> None:
        """Break the connection without a word, as a network may: both ends find out."""
        if self._channel is not None:
            self._channel.close()

    def _open(self) -> None:
        """Find the other end, then become the receiving thread."""
        start, spec = time.monotonic(), self.spec
        try:
            # What was sent before it was given up (a state that is lent) must go out all the same.
            if spec.at:
                channel = self._port.call(spec.at, spec.link_id, spec.open_timeout_s, self._needless)
            else:
                channel = self._port.meet(spec.link_id, spec.open_timeout_s, self._needless)
        except Unmet as error:
            self._tell(Broken(self, f"could not be opened: {error}"))
            return
        if channel is None:
            return
        self._channel = channel
        threading.Thread(target=self._send_all, args=(channel,), name=f"send {spec.link_id}", daemon=True).start()
        self._tell(Opened(self, time.monotonic() - start))
        self._receive_all(channel)

    def _needless(self) -> bool:
        """Given up, with nothing left to send?"""
        return self._abandoned and not self._queued

    def _send_all(self, channel: Channel) -> None:
        """Send what is queued, until the edge is given up. Whether it broke is the receiving thread's to find out."""
        while (frame := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):
                channel.write(*frame)
            with self._sending:
                self._queued -= 1
        with contextlib.suppress(OSError):
            channel.write(_GOODBYE)
        channel.close()

    def _receive_all(self, channel: Channel) -> None:
        line_free, raw = 0.0, bytearray(HEADER_BYTES)
        try:
            while True:
                channel.read_into(memoryview(raw))
                header = unpack(raw, self.spec.max_bytes)
                if header.content is Content.BYE:
                    return
                payload = receive_buffer(header)
                channel.read_into(as_bytes(payload))
                line_free = self._emulate_link(header, line_free)
                self._tell(Arrived(self, header, payload))
        except (Closed, WireError, OSError) as error:
            self._tell(Broken(self, _reason(error)))

    def _emulate_link(self, header: Header, line_free: float) -> float:
        """Hold a frame until a link of the given latency and bandwidth would have delivered it.

        Frames queue for the line (bandwidth) but overlap in flight (latency). Returns when the line is free again.
        """
        if time.monotonic() < self.hold_until:
            time.sleep(self.hold_s)
        if not self.spec.latency_s and self.spec.bandwidth is None:
            return line_free
        line_free = max(line_free, header.sent_at)
        if self.spec.bandwidth is not None:
            line_free += header.nbytes / self.spec.bandwidth
        time.sleep(max(0.0, line_free + self.spec.latency_s - time.monotonic()))
        return line_free

    def _tell(self, item: Opened | Arrived | Broken) -> None:
        if not self._abandoned:
            self._inbox.put(item)


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return str(text).splitlines()[0][:200] if text else type(error).__name__
