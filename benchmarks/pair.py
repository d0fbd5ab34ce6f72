"""Two processes with a raw gloo group and a planaria edge between them: what transport is measured on."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

_TAG, _TIMEOUT_S = 7, 30.0
Side = Literal["gloo", "edge"]


class End:
    """One of the two processes."""

    def __init__(self, port: int, rank: int, max_bytes: int) -> None:
        import torch

        from planaria.transport.edge import Edge, EdgeSpec
        from planaria.transport.group import open_group

        torch.set_num_threads(1)
        self._port, self._rank, self._other = port, rank, 1 - rank
        self._group = open_group("127.0.0.1", port, "raw", rank, _TIMEOUT_S)
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._edge = Edge(EdgeSpec("127.0.0.1", port, "edge", rank, 1 - rank, max_bytes, _TIMEOUT_S), self._inbox)
        self._expect("Opened")
        self._buffer, self._ack = torch.zeros(max_bytes // 4), torch.zeros(1)

    def give(self, side: Side, size: int, count: int) -> float:
        """Send ``count`` messages of ``size`` bytes; seconds until the other end's word that the last is in."""
        payload, began = self._buffer[: size // 4], time.monotonic()
        for _ in range(count):
            self._send(side, payload)
        self._receive(side, self._ack)
        return time.monotonic() - began

    def take(self, side: Side, size: int, count: int) -> None:
        """Be the other end of :meth:`give`."""
        payload = self._buffer[: size // 4]
        for _ in range(count):
            self._receive(side, payload)
        self._send(side, self._ack)

    def link(self, name: str) -> float:
        """Seconds that a new group to the other end takes, which must ask for it too."""
        from planaria.transport.group import open_group

        began = time.monotonic()
        group = open_group("127.0.0.1", self._port, name, self._rank, _TIMEOUT_S)
        took = time.monotonic() - began
        del group  # which takes longer than making it
        return took

    def _send(self, side: Side, payload: Tensor) -> None:
        from planaria.transport.wire import Content, Header

        if side == "gloo":
            self._group.send([payload], self._other, _TAG).wait()
        else:
            shape = tuple(payload.shape)
            self._edge.send(Header(Content.FORWARD, 1, 1, 1, 1, payload.dtype, shape, time.monotonic()), payload)

    def _receive(self, side: Side, into: Tensor) -> None:
        if side == "gloo":
            self._group.recv([into], self._other, _TAG).wait()
        else:
            self._expect("Arrived")

    def _expect(self, kind: str) -> None:
        item = self._inbox.get(timeout=_TIMEOUT_S)
        if type(item).__name__ != kind:
            raise RuntimeError(f"{kind} was expected of the edge, which said {item}")


class Pair:
    """This process's end, and orders to the other."""

    def __init__(self, end: End, orders: Connection) -> None:
        self._end, self._orders = end, orders

    def transfer(self, side: Side, size: int, count: int) -> float:
        """Seconds of ``count`` messages of ``size`` bytes to the other process and its word that the last is in."""
        self._orders.send((side, size, count))
        return self._end.give(side, size, count)

    def link(self, name: str) -> float:
        """Seconds that a new group between the two takes."""
        self._orders.send(("link", name))
        return self._end.link(name)


@contextmanager
def opened(max_bytes: int) -> Iterator[Pair]:
    """A pair for messages of at most ``max_bytes``."""
    from planaria.transport.rendezvous import Rendezvous

    rendezvous = Rendezvous("127.0.0.1", 0)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_other, args=(rendezvous.port, max_bytes, theirs), daemon=True)
    process.start()
    try:
        yield Pair(End(rendezvous.port, 0, max_bytes), ours)
    finally:
        ours.send(None)
        process.join(5)


def _other(port: int, max_bytes: int, orders: Connection) -> None:
    """The other process: does its part of what it is told, until the orders end."""
    end = End(port, 1, max_bytes)
    while (order := orders.recv()) is not None:
        if order[0] == "link":
            end.link(order[1])
        else:
            end.take(*order)
