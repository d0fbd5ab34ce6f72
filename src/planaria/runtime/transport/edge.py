"""A pipeline edge: one connection, served by the worker's inbox.

As much of a frame as fits is sent immediately; the inbox sends the rest. Received frames and errors go to the inbox, so
that the main thread never waits for a single edge. An abandoned edge closes after its earlier frames and a last one.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planaria.common.address import REACHABLE, Reach
from planaria.runtime.transport.channel import Channel, ChannelClosed
from planaria.runtime.transport.emulated_link import EmulatedLink
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.transport.listener import cause
from planaria.runtime.transport.pieces import Incoming, Outgoing
from planaria.runtime.transport.port import PeerUnreachable, Port, RelayUnanswered
from planaria.runtime.transport.wire import (
    HEADER_BYTES,
    Ack,
    Activation,
    EdgeClosing,
    Label,
    Piece,
    TensorHeader,
    WireError,
    as_bytes,
    in_ring,
    pack,
    receive_buffer,
    unpack,
)

_EDGE_CLOSING = memoryview(pack(TensorHeader(EdgeClosing(), torch.uint8, (0,))))
_ACK = memoryview(pack(TensorHeader(Ack(), torch.uint8, (0,))))
_NOTHING, _IN_RING = torch.empty(0), memoryview(b"")
_TURN_BYTES = 4 << 20
"""bytes of a large frame to read before orders and other edges get a turn"""
_MAX_TRANSITS = 4096
"""number of recorded transits"""


@dataclass(frozen=True)
class EdgeSpec:
    """Identity and limits of an edge. ``peer`` is the node at the other end.

    The end with an address (``at``) connects; the other waits.
    """

    link_id: str
    at: str
    peer: int
    max_bytes: int
    open_timeout_s: float
    link: EmulatedLink | None = None
    """emulated link that delays received frames"""
    relay_address: str = ""
    """HOST:PORT of the relay that connects the ends; empty: their addresses decide"""


@dataclass(frozen=True)
class EdgeOpened:
    """The edge is connected, ``seconds`` after the request."""

    edge: EdgeEnd
    seconds: float


@dataclass(frozen=True)
class FrameArrived:
    edge: EdgeEnd
    header: TensorHeader
    payload: Tensor


@dataclass(frozen=True)
class EdgeFailed:
    """The edge is broken; reported once."""

    edge: EdgeEnd
    detail: str
    silent_relay: bool = False
    """whether the edge could not open because its relay does not answer"""
    received_invalid_frame: bool = False
    """whether the other end sent an invalid frame, or one that this edge does not carry"""


class EdgeEnd(ABC):
    """One end of an edge."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        self.sent_bytes = 0
        self.hold_s, self.hold_until = 0.0, 0.0
        """an injected fault: each received frame is held for ``hold_s``, until ``hold_until`` (monotonic seconds)"""
        self.transits: deque[float] = deque(maxlen=_MAX_TRANSITS)
        """seconds that received activations took since their send call, by the sender's clock and ours"""

    @abstractmethod
    def send(self, label: Label, payload: Tensor, later: bool = False) -> None:
        """Send a frame. Frames sent afterwards overtake a frame that is sent ``later``."""

    @abstractmethod
    def flush_deferred(self) -> None:
        """Send the deferred frames (``later=True``) now."""

    @abstractmethod
    def abandon(self) -> None:
        """Stop receiving; frames that were sent before still go out."""

    @abstractmethod
    def reset(self) -> None:
        """Break the edge without notice, as a network failure does; both ends detect it."""


class Transport(Protocol):
    """Connections between workers."""

    @property
    def address(self) -> str:
        """HOST:PORT of the listener; empty in a shared process."""

    @property
    def trouble(self) -> str:
        """The error of the edge that has failed to open for the longest time; empty if there is none."""

    def edge(self, spec: EdgeSpec) -> EdgeEnd:
        """Open this worker's end of an edge; :class:`EdgeOpened` follows."""

    def partition(self, seconds: float) -> None:
        """Partition this worker from all others for ``seconds`` (an injected fault)."""


class Edge(EdgeEnd):
    """An edge over a connection. The inbox serves it; the worker's main thread calls the other methods, any thread
    :meth:`send`.
    """

    def __init__(self, spec: EdgeSpec, port: Port, inbox: Inbox) -> None:
        super().__init__(spec)
        self._port, self._inbox = port, inbox
        self._unsent: deque[tuple[memoryview, memoryview]] = deque()
        self._later = Outgoing()
        """low-priority frames to send"""
        self._coming = Incoming()
        """low-priority frame that arrives"""
        self._sending = threading.Lock()
        """guards sending and the following four fields"""
        self._channel: Channel | None = None
        self._abandoned = False
        self._goodbye_queued = False
        self._over = False
        self._raw = bytearray(HEADER_BYTES)
        self._header: TensorHeader | None = None
        self._payload = _NOTHING
        self._missing = memoryview(self._raw)
        """unfilled part of a header or its payload"""
        self._due = 0.0
        threading.Thread(target=self._open, name=f"open {spec.link_id}", daemon=True).start()

    def send(self, label: Label, payload: Tensor, later: bool = False) -> None:
        """Send a frame, queueing what does not fit; the payload must not change until it has been sent.

        :raises WireError: if the tensor or label does not fit a frame.
        """
        with self._sending:
            self.sent_bytes += payload.nbytes
            if self._over:
                return
            begun = bool(self._unsent)
            if later:
                self._later.add(label, payload)
            else:
                self._unsent.append(self._frame(label, payload.contiguous()))
            if not begun:
                self._push()

    def _frame(self, label: Label, payload: Tensor) -> tuple[memoryview, memoryview]:
        """Return the bytes to write: a header, and its payload unless that is in a ring."""
        header = TensorHeader(label, payload.dtype, payload.shape, time.monotonic())
        share = self._channel.share(payload) if self._channel is not None and in_ring(label) else None
        if share is not None:
            return memoryview(pack(header._replace(slot=share.slot, ticket=share.ticket))), _IN_RING
        return memoryview(pack(header)), as_bytes(payload)

    def flush_deferred(self) -> None:
        """Send low-priority frames without limit, since there are no others."""
        with self._sending:
            if not self._over and self._later:
                self._later.lift_limit()
                if not self._unsent:
                    self._push()

    def abandon(self) -> None:
        """Stop reporting, and send a goodbye after earlier frames if possible."""
        with self._sending:
            self._abandoned = True
            self._later.clear()
            if self._channel is not None and not self._over:
                self._channel.expire()
                self._inbox.watch_writable(self, True)
        self._port.wake_waiters()

    def reset(self) -> None:
        if self._channel is not None:
            self._channel.shut_down()

    def fileno(self) -> int:
        return -1 if self._channel is None else self._channel.fileno()

    def serve(self) -> None:
        """Send pending data and read received data. Called by the inbox."""
        channel = self._channel
        if channel is None or self._over:
            return
        try:
            if self._unsent or self._later or self._abandoned:
                with self._sending:
                    if self._send_on(channel):
                        self._inbox.watch_writable(self, False)
            # Closing with unread data would discard sent data: the other end closes after the goodbye.
            if self._read(channel):
                self._close(channel)
        except (ChannelClosed, WireError, OSError) as error:
            self._close(channel)
            self._deliver(
                EdgeFailed(self, cause(error), received_invalid_frame=isinstance(error, WireError)), self._due
            )

    def _open(self) -> None:
        """Connect to the other end, then register with the inbox."""
        start, spec = time.monotonic(), self.spec
        try:
            # Frames sent before the edge was abandoned (a transferred state) must still go out.
            channel = self._port.reach(
                spec.at,
                spec.relay_address,
                spec.link_id,
                spec.open_timeout_s,
                given_up=lambda: self._abandoned and not self._unsent,
            )
        except PeerUnreachable as error:
            if not self._abandoned:
                silent = isinstance(error, RelayUnanswered)
                self._inbox.put(EdgeFailed(self, f"could not be opened: {error}", silent_relay=silent))
            return
        if channel is None:
            return
        with self._sending:
            self._channel = channel
        if not self._abandoned:
            self._inbox.put(EdgeOpened(self, time.monotonic() - start))
        self._inbox.watch(self)
        with self._sending:  # requests from before it was watched
            if not self._over and (self._unsent or self._later or self._abandoned):
                self._inbox.watch_writable(self, True)

    def _send_on(self, channel: Channel) -> bool:
        """Send without blocking; return whether nothing is left. The reader detects a broken connection."""
        while True:
            if not self._unsent:
                if (piece := self._later.next()) is not None:
                    self._unsent.append(piece)
                elif self._goodbye_queued or not self._abandoned:
                    return True
                else:
                    self._unsent.append((_EDGE_CLOSING, _EDGE_CLOSING[:0]))
                    self._goodbye_queued = True
            first, second = self._unsent[0]
            try:
                sent = channel.write_some(first, second)
            except OSError:
                self._unsent.clear()
                self._later.clear()
                self._goodbye_queued = self._abandoned
                return True
            if sent < len(first) + len(second):
                self._unsent[0] = first[sent:], second[max(0, sent - len(first)) :]
                return False
            self._unsent.popleft()

    def _read(self, channel: Channel) -> bool:
        """Read until no data is left, a frame is complete, or it is others' turn; return whether a goodbye was
        received.
        """
        read = 0
        while (got := channel.read_some(self._missing)) is not None:
            self._missing, read = self._missing[got:], read + got
            if self._missing:
                if read >= _TURN_BYTES and not channel.unseen():
                    break
                continue
            if self._header is None:
                self._header = unpack(self._raw, self.spec.max_bytes)
                if isinstance(self._header.label, EdgeClosing):
                    return True
                self._missing = self._payload_memory(self._header, channel)
            if not self._missing:
                self._process_frame(self._header)
                self._header = None
                self._payload = _NOTHING
                self._missing = memoryview(self._raw)
                if not channel.unseen():
                    break
        channel.expect(len(self._missing))
        return False

    def _payload_memory(self, header: TensorHeader, channel: Channel) -> memoryview:
        """Return the memory for the payload that follows a header."""
        if header.announced:
            self._coming.announce(header)
            return memoryview(b"")
        if isinstance(header.label, Piece):
            return self._coming.piece_memory(header.nbytes)
        if header.slot:
            self._payload = channel.shared(header)
            return _IN_RING
        self._payload = receive_buffer(header)
        return as_bytes(self._payload)

    def _process_frame(self, header: TensorHeader) -> None:
        if isinstance(header.label, Ack):
            with self._sending:
                self._later.on_ack()
                self._push()
        elif isinstance(header.label, Piece):
            due = self._emulate_link(header)
            self._inbox.call(self._acknowledge, due)
            if (whole := self._coming.whole()) is not None:
                self._deliver(FrameArrived(self, *whole), due)
        elif not header.announced:
            due = self._emulate_link(header)
            if isinstance(header.label, Activation):
                self.transits.append(max(due, time.monotonic()) - header.sent_at)
            self._deliver(FrameArrived(self, header, self._payload), due)

    def _acknowledge(self) -> None:
        """Acknowledge a piece, so that the next can be sent."""
        with self._sending:
            if not self._over and not self._abandoned:
                self._unsent.append((_ACK, _ACK[:0]))
                self._push()

    def _push(self) -> None:
        """Send without blocking, and let the inbox send the rest."""
        if self._channel is not None and not self._send_on(self._channel):
            self._inbox.watch_writable(self, True)

    def _emulate_link(self, header: TensorHeader) -> float:
        """Return when the emulated link, if any, delivers a frame (monotonic seconds)."""
        if (begin := max(self._due, time.monotonic())) < self.hold_until:
            self._due = begin + self.hold_s
        if self.spec.link is not None:
            ready = min(header.sent_at, time.monotonic())
            self._due = max(self._due, self.spec.link.arrival(ready, header.nbytes))
        return self._due

    def _close(self, channel: Channel) -> None:
        with self._sending:
            self._over = True
            self._unsent.clear()
            self._later.clear()
        self._inbox.forget(self)
        channel.close()

    def _deliver(self, item: FrameArrived | EdgeFailed, due: float) -> None:
        if not self._abandoned:
            self._inbox.deliver(item, due)


class SocketTransport(Port):
    """The transport of a worker with its own process."""

    def __init__(self, inbox: Inbox, host: str, key: bytes, reach: Reach = REACHABLE) -> None:
        super().__init__(host, key, reach)
        self._inbox = inbox

    def edge(self, spec: EdgeSpec) -> Edge:
        return Edge(spec, self, self._inbox)
