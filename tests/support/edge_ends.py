"""Ends of edges in this process, and the bytes of their channels."""

from __future__ import annotations

import time
from queue import Empty
from typing import Any

import torch

from planaria.runtime.transport.channel import Channel
from planaria.runtime.transport.edge import Edge, EdgeSpec
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.wire import FrameContent, Ping

SOON_S = 20.0
"""a busy machine's patience"""
QUIET_S = 0.3


class End:
    """One end of an edge with its own inbox."""

    def __init__(self, spec: EdgeSpec, port: Port) -> None:
        self.port, self.inbox = port, Inbox()
        self.edge: Any = Edge(spec, port, self.inbox)

    def next(self, kind: type[Any]) -> Any:
        item = self.inbox.get(timeout=SOON_S)
        assert isinstance(item, kind), item
        return item

    def send(self, payload: torch.Tensor, number: int = 0, later: bool = False) -> None:
        self.edge.send(Ping(number, FrameContent.PING), payload, later)

    def receives_nothing(self) -> bool:
        try:
            self.inbox.get(timeout=QUIET_S)
        except Empty:
            return True
        return False


def read(channel: Channel, size: int) -> bytes:
    """Return ``size`` bytes from the other end."""
    got, buffer, deadline = b"", memoryview(bytearray(1 << 16)), time.monotonic() + SOON_S
    while len(got) < size:
        assert time.monotonic() < deadline
        count = channel.read_some(buffer[: size - len(got)])
        if count is None:
            time.sleep(0.001)
        else:
            got += bytes(buffer[:count])
    return got


def write(channel: Channel, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        sent = channel.write_some(rest, rest[:0])
        rest = rest[sent:]
        if not sent:
            time.sleep(0.001)
