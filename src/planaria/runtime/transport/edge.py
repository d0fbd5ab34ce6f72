"""One pipeline edge: one connection, served by the inbox beside everything else that the worker listens to.

What fits is sent at once, and the inbox sends the rest. What arrives, and what goes wrong, lands in the inbox, so the
main thread never waits for one edge alone. An edge that is given up says goodbye behind all that was sent before, and
closes.
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

from planaria.runtime.transport.channel import Channel, Closed
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.transport.pieces import Incoming, Outgoing
from planaria.runtime.transport.port import Port, RelaySilent, Unmet
from planaria.runtime.transport.wire import (
    HEADER_BYTES,
    Activation,
    Goodbye,
    Header,
    Label,
    Piece,
    Taken,
    WireError,
    as_bytes,
    in_ring,
    pack,
    receive_buffer,
    unpack,
)

_GOODBYE = memoryview(pack(Header(Goodbye(), torch.uint8, (0,))))
_TAKEN = memoryview(pack(Header(Taken(), torch.uint8, (0,))))
_NOTHING, _IN_RING = torch.empty(0), memoryview(b"")
_TURN_BYTES = 4 << 20
"""of a large frame that are read before orders and other edges have their turn"""
_MOST_TRANSITS = 4096
"""that are kept until somebody asks"""


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
    over: str = ""
    """HOST:PORT of the relay where the ends meet; empty: they reach each other as their addresses say"""


@dataclass(frozen=True)
class Opened:
    """The other end is there; ``seconds`` since the edge was asked for."""

    edge: EdgeEnd
    seconds: float


@dataclass(frozen=True)
class Arrived:
    """A checked frame."""

    edge: EdgeEnd
    header: Header
    payload: Tensor


@dataclass(frozen=True)
class Broken:
    """The edge is of no more use; said once."""

    edge: EdgeEnd
    detail: str
    silent_relay: bool = False
    """could the edge not be opened because its relay does not answer?"""
    strange: bool = False
    """did the other end send what is no frame, or none that this edge carries?"""


class EdgeEnd(ABC):
    """One end of an edge."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        self.sent_bytes = 0
        self.hold_s, self.hold_until = 0.0, 0.0
        """a fault: each frame that arrives is held for so long, until then (monotonic seconds)"""
        self.transits: deque[float] = deque(maxlen=_MOST_TRANSITS)
        """of the activations that came: seconds from being handed over by the sender, by its clock and ours"""

    @abstractmethod
    def send(self, label: Label, payload: Tensor, later: bool = False) -> None:
        """Send a frame. Frames sent afterwards overtake a frame that is sent ``later``."""

    @abstractmethod
    def hurry(self) -> None:
        """Send the frames that were sent ``later`` now."""

    @abstractmethod
    def abandon(self) -> None:
        """Stop receiving; frames that were sent before still go out."""

    @abstractmethod
    def reset(self) -> None:
        """Break the edge without notice, as a network failure does; both ends detect it."""


class Transport(Protocol):
    """How a worker connects to others."""

    @property
    def address(self) -> str:
        """HOST:PORT of the listener; empty in a shared process."""

    @property
    def trouble(self) -> str:
        """The error of the edge that has failed to open for the longest time; empty if there is none."""

    def edge(self, spec: EdgeSpec) -> EdgeEnd:
        """Open this worker's end of an edge; :class:`Opened` follows."""

    def shut(self, seconds: float) -> None:
        """Partition this worker from all others for ``seconds`` (an injected fault)."""


class Edge(EdgeEnd):
    """An edge over a connection. The inbox serves it; all else is called by the worker's main thread, :meth:`send` by
    any."""

    def __init__(self, spec: EdgeSpec, port: Port, inbox: Inbox) -> None:
        super().__init__(spec)
        self._port, self._inbox = port, inbox
        self._unsent: deque[tuple[memoryview, memoryview]] = deque()
        self._later, self._coming = Outgoing(), Incoming()
        """what may wait"""
        self._sending = threading.Lock()
        """held by who sends, or changes what the next four say"""
        self._channel: Channel | None = None
        self._abandoned = self._parted = self._over = False
        self._raw = bytearray(HEADER_BYTES)
        self._header: Header | None = None
        self._payload = _NOTHING
        self._missing = memoryview(self._raw)
        """what is still to be filled, of a header or of the payload behind it"""
        self._line_free = self._due = 0.0
        threading.Thread(target=self._open, name=f"open {spec.link_id}", daemon=True).start()

    def send(self, label: Label, payload: Tensor, later: bool = False) -> None:
        """Send a frame, or queue what does not fit at once; the payload must not change until it has left.

        One that may wait (``later``) lets all others pass that are sent before it is whole.

        :raises WireError: when such a tensor or label does not fit a frame.
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
        """What is written: a header, and the payload behind it unless that is in a ring that the other end reads."""
        header = Header(label, payload.dtype, payload.shape, time.monotonic())
        raw = pack(header)
        share = self._channel.share(payload) if self._channel is not None and in_ring(label) else None
        if share is not None:
            return memoryview(pack(header._replace(slot=share.slot, ticket=share.ticket))), _IN_RING
        return memoryview(raw), as_bytes(payload)

    def hurry(self) -> None:
        """Nothing else is to be sent for now: what may wait need not."""
        with self._sending:
            if not self._over and self._later:
                self._later.hurry()
                if not self._unsent:
                    self._push()

    def abandon(self) -> None:
        """Stop reporting; say goodbye to the other end, behind what was sent before, if it can still hear it."""
        with self._sending:
            self._abandoned = True
            self._later.clear()
            if self._channel is not None and not self._over:
                self._channel.expire()
                self._inbox.want_room(self, True)
        self._port.look_up()

    def reset(self) -> None:
        """Break the connection without a word, as a network may: both ends find out."""
        if self._channel is not None:
            self._channel.hang_up()

    def fileno(self) -> int:
        return -1 if self._channel is None else self._channel.fileno()

    def serve(self) -> None:
        """Send what is left and read what has come. Called by the inbox."""
        channel = self._channel
        if channel is None or self._over:
            return
        try:
            if self._unsent or self._later or self._abandoned:
                with self._sending:
                    if self._send_on(channel):
                        self._inbox.want_room(self, False)
            # Closing with something unread would take back what was sent: the other end hangs up after the goodbye.
            if self._read(channel):
                self._close(channel)
        except (Closed, WireError, OSError) as error:
            self._close(channel)
            self._deliver(Broken(self, _reason(error), strange=isinstance(error, WireError)), self._due)

    def _open(self) -> None:
        """Find the other end, then leave the edge to the inbox."""
        start, spec = time.monotonic(), self.spec
        try:
            # What was sent before it was given up (a state that is lent) must go out all the same.
            channel = self._port.reach(spec.at, spec.over, spec.link_id, spec.open_timeout_s, self._needless)
        except Unmet as error:
            if not self._abandoned:
                silent = isinstance(error, RelaySilent)
                self._inbox.put(Broken(self, f"could not be opened: {error}", silent_relay=silent))
            return
        if channel is None:
            return
        with self._sending:
            self._channel = channel
        if not self._abandoned:
            self._inbox.put(Opened(self, time.monotonic() - start))
        self._inbox.watch(self)
        with self._sending:  # what was wanted before it was watched
            if not self._over and (self._unsent or self._later or self._abandoned):
                self._inbox.want_room(self, True)

    def _needless(self) -> bool:
        """Given up, with nothing left to send?"""
        return self._abandoned and not self._unsent

    def _send_on(self, channel: Channel) -> bool:
        """Send what there is room for; is there nothing left? The reader finds out whether the connection broke."""
        while True:
            if not self._unsent:
                if (piece := self._later.next()) is not None:
                    self._unsent.append(piece)
                elif self._parted or not self._abandoned:
                    return True
                else:
                    self._unsent.append((_GOODBYE, _GOODBYE[:0]))
                    self._parted = True
            first, second = self._unsent[0]
            try:
                sent = channel.write_some(first, second)
            except OSError:
                self._unsent.clear()
                self._later.clear()
                self._parted = self._abandoned
                return True
            if sent < len(first) + len(second):
                self._unsent[0] = first[sent:], second[max(0, sent - len(first)) :]
                return False
            self._unsent.popleft()

    def _read(self, channel: Channel) -> bool:
        """Read until nothing is there, a frame is whole, or others want a turn; has the other end said goodbye?"""
        read = 0
        while (got := channel.read_some(self._missing)) is not None:
            self._missing, read = self._missing[got:], read + got
            if self._missing:
                if read >= _TURN_BYTES and not channel.unseen():
                    break
                continue
            if self._header is None:
                self._header = unpack(self._raw, self.spec.max_bytes)
                if isinstance(self._header.label, Goodbye):
                    return True
                self._missing = self._room(self._header, channel)
            if not self._missing:
                self._filled(self._header)
                self._header, self._payload, self._missing = None, _NOTHING, memoryview(self._raw)
                if not channel.unseen():
                    break
        channel.expect(len(self._missing))
        return False

    def _room(self, header: Header, channel: Channel) -> memoryview:
        """Where the payload goes that comes behind a header."""
        if header.announced:
            self._coming.announce(header)
            return memoryview(b"")
        if isinstance(header.label, Piece):
            return self._coming.room(header.nbytes)
        if header.slot:
            self._payload = channel.shared(header)
            return _IN_RING
        self._payload = receive_buffer(header)
        return as_bytes(self._payload)

    def _filled(self, header: Header) -> None:
        """A frame is there."""
        if isinstance(header.label, Taken):
            with self._sending:
                self._later.taken()
                self._push()
        elif isinstance(header.label, Piece):
            due = self._emulate_link(header)
            self._inbox.call(self._tell_taken, due)
            if (whole := self._coming.whole()) is not None:
                self._deliver(Arrived(self, *whole), due)
        elif not header.announced:
            due = self._emulate_link(header)
            if isinstance(header.label, Activation):
                self.transits.append(max(due, time.monotonic()) - header.sent_at)
            self._deliver(Arrived(self, header, self._payload), due)

    def _tell_taken(self) -> None:
        """A piece has come over the link: there may be another."""
        with self._sending:
            if not self._over and not self._abandoned:
                self._unsent.append((_TAKEN, _TAKEN[:0]))
                self._push()

    def _push(self) -> None:
        """Send what there is room for, and the rest when there is."""
        if self._channel is not None and not self._send_on(self._channel):
            self._inbox.want_room(self, True)

    def _emulate_link(self, header: Header) -> float:
        """When a link of the given latency and bandwidth would have delivered a frame (monotonic seconds).

        Frames queue for the line (bandwidth) but overlap in flight (latency).
        """
        if (begin := max(self._due, time.monotonic())) < self.hold_until:
            self._due = begin + self.hold_s
        if self.spec.latency_s or self.spec.bandwidth is not None:
            self._line_free = max(self._line_free, min(header.sent_at, time.monotonic()))
            if self.spec.bandwidth is not None:
                self._line_free += header.nbytes / self.spec.bandwidth
            self._due = max(self._due, self._line_free + self.spec.latency_s)
        return self._due

    def _close(self, channel: Channel) -> None:
        with self._sending:
            self._over = True
            self._unsent.clear()
            self._later.clear()
        self._inbox.forget(self)
        channel.close()

    def _deliver(self, item: Arrived | Broken, due: float) -> None:
        if not self._abandoned:
            self._inbox.deliver(item, due)


class SocketTransport:
    """The transport of a worker that has its own process."""

    def __init__(self, port: Port, inbox: Inbox) -> None:
        self.port, self._inbox = port, inbox

    @property
    def address(self) -> str:
        return self.port.address

    @property
    def trouble(self) -> str:
        return self.port.trouble

    def edge(self, spec: EdgeSpec) -> Edge:
        return Edge(spec, self.port, self._inbox)

    def shut(self, seconds: float) -> None:
        self.port.shut(seconds)


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return str(text).splitlines()[0][:200] if text else type(error).__name__
