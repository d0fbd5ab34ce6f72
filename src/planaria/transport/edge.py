"""One pipeline edge: a two-rank group, a thread that sends and a thread that receives.

A blocked gloo wait cannot be interrupted, so nobody ever waits for these threads: their results land in an inbox beside
everything else the worker listens to, and an edge of an old generation is abandoned, not joined. Both ends say goodbye
when they abandon an edge, which lets the other end's receiver thread go too.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from planaria.transport.buffers import receive_buffer
from planaria.transport.group import NEVER, Group, open_group
from planaria.transport.wire import HEADER_BYTES, Content, Header, WireError, pack, unpack

_HEADER_TAG, _PAYLOAD_TAG = 1, 2


@dataclass(frozen=True)
class EdgeSpec:
    """Where an edge meets and what it may carry. ``peer`` is the node at the other end."""

    host: str
    port: int
    link_id: str
    rank: int
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

    def __init__(self, spec: EdgeSpec, inbox: SimpleQueue[Any]) -> None:
        self.spec = spec
        self.sent_bytes = 0
        self._inbox = inbox
        self._outbox: SimpleQueue[tuple[Header, Tensor]] = SimpleQueue()
        self._abandoned = False
        self._told = threading.Lock()
        threading.Thread(target=self._open, name=f"open {spec.link_id}", daemon=True).start()

    def send(self, header: Header, payload: Tensor) -> None:
        """Queue a frame; the payload must not change until it has left."""
        self.sent_bytes += header.nbytes
        self._outbox.put((header, payload.contiguous()))

    def abandon(self) -> None:
        """Stop reporting; say goodbye to the other end if it can still hear it."""
        self._abandoned = True
        self._outbox.put((Header(Content.BYE, 0, 0, 0, 0, torch.uint8, (0,)), torch.empty(0, dtype=torch.uint8)))

    def _open(self) -> None:
        """Find the other end, then become the receiving thread."""
        start, spec = time.monotonic(), self.spec
        try:
            group = open_group(spec.host, spec.port, spec.link_id, spec.rank, spec.open_timeout_s)
        except RuntimeError as error:
            self._broken(f"could not be opened: {_first_line(error)}")
            return
        threading.Thread(target=self._send_all, args=(group,), name=f"send {spec.link_id}", daemon=True).start()
        self._tell(Opened(self, time.monotonic() - start))
        self._receive_all(group)

    def _send_all(self, group: Group) -> None:
        other = 1 - self.spec.rank
        try:
            while True:
                header, payload = self._outbox.get()
                works = [group.send([pack(header)], other, _HEADER_TAG)]
                if header.nbytes:
                    works.append(group.send([payload], other, _PAYLOAD_TAG))
                for work in works:
                    work.wait(NEVER)
                if header.content is Content.BYE:
                    return
        except RuntimeError as error:
            self._broken(_first_line(error))

    def _receive_all(self, group: Group) -> None:
        other, line_free = 1 - self.spec.rank, 0.0
        try:
            raw = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            announced = group.recv([raw], other, _HEADER_TAG)
            while True:
                announced.wait(NEVER)
                header = unpack(raw, self.spec.max_bytes)
                if header.content is Content.BYE:
                    return
                payload = receive_buffer(header)
                body = group.recv([payload], other, _PAYLOAD_TAG) if header.nbytes else None
                # The next header is asked for before this payload is in: one round trip less per frame.
                announced = group.recv([raw], other, _HEADER_TAG)
                if body is not None:
                    body.wait(NEVER)
                line_free = self._emulate_link(header, line_free)
                self._tell(Arrived(self, header, payload))
        except RuntimeError as error:
            self._broken(_first_line(error))
        except WireError as error:
            self._broken(str(error))

    def _emulate_link(self, header: Header, line_free: float) -> float:
        """Hold a frame until a link of the given latency and bandwidth would have delivered it.

        Frames queue for the line (bandwidth) but overlap in flight (latency). Returns when the line is free again.
        """
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

    def _broken(self, detail: str) -> None:
        """Report the first of possibly two failures (both threads meet the same broken connection)."""
        if self._told.acquire(blocking=False):
            self._tell(Broken(self, detail))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
