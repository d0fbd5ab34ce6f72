"""Two processes with raw connections and planaria's edges between them: what transport is measured on."""

from __future__ import annotations

import multiprocessing as mp
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

_TAG, _TIMEOUT_S = 7, 30.0
Side = Literal["gloo", "socket", "edge", "ring", "filled ring", "raw tls", "edge tls"]
SIDES: tuple[Side, ...] = ("gloo", "socket", "edge", "ring", "filled ring", "raw tls", "edge tls")
ACK_BYTES = 8
SLOTS = 2


class End:
    """One of the two processes. The other end's edges listen at ``there``; empty where they call."""

    def __init__(self, folder: Path, rank: int, key: bytes, max_bytes: int, told: Connection) -> None:
        import torch

        from planaria.runtime.transport.inbox import Inbox
        from planaria.runtime.transport.port import Port
        from planaria.runtime.transport.ring import Ring, Rings

        torch.set_num_threads(1)
        self._rank, self._other, self._key, self._folder = rank, 1 - rank, key, folder
        self._port, self._inbox, self._ring = Port("127.0.0.1", key), Inbox(), Ring(SLOTS, max_bytes)
        self._port.rings = Rings(self._ring)
        told.send(self._port.address)
        self._there = told.recv()
        self._group = _gloo(folder / "store", rank)
        self._raw = {
            "socket": _connected(folder / "socket", rank),
            "raw tls": _proved(_connected(folder / "tls", rank), rank, key),
        }
        self._edges = {name: self._edge(name, max_bytes) for name in ("edge", "ring", "filled ring", "edge tls")}
        self._buffer, self._ack = torch.zeros(max_bytes, dtype=torch.uint8), torch.zeros(ACK_BYTES, dtype=torch.uint8)

    def give(self, side: Side, size: int, count: int) -> float:
        """Send ``size`` bytes and wait for the answer, so many times; mean seconds of one round trip."""
        payload, began = self._buffer[:size], time.monotonic()
        for _ in range(count):
            self._send(side, payload)
            self._receive(side, self._ack)
        return (time.monotonic() - began) / count

    def take(self, side: Side, size: int, count: int) -> None:
        """Be the other end of :meth:`give`."""
        payload = self._buffer[:size]
        for _ in range(count):
            self._receive(side, payload)
            self._send(side, self._ack)

    def link(self, name: str) -> float:
        """Seconds that a new edge to the other end takes, which must ask for it too."""
        began = time.monotonic()
        edge = self._edge(name, 1 << 20)
        took = time.monotonic() - began
        edge.abandon()
        return took

    def prove(self, number: int) -> float:
        """Seconds that the two ends of a new connection take to prove the run's key to each other."""
        raw = _connected(self._folder / f"proof-{number}", self._rank)
        began = time.monotonic()
        with _proved(raw, self._rank, self._key) as tls:
            tls.sendall(b"!")  # the calling end is through before the other has judged it
            tls.recv(1)
            return time.monotonic() - began

    def _edge(self, name: str, max_bytes: int) -> Any:
        from planaria.runtime.transport import channel
        from planaria.runtime.transport.edge import Edge, EdgeSpec

        inside = channel.meet_here  # type: ignore[attr-defined]
        channel.meet_here = inside if name != "edge tls" else lambda tls: None  # type: ignore[attr-defined]
        at = self._there if self._rank else ""
        edge = Edge(EdgeSpec(name, at, self._other, max_bytes, _TIMEOUT_S), self._port, self._inbox)
        self._expect("Opened")
        channel.meet_here = inside  # type: ignore[attr-defined]
        return edge

    def _send(self, side: Side, payload: Tensor) -> None:
        from planaria.runtime.transport.wire import Content, Ping

        if side == "gloo":
            self._group.send([payload], self._other, _TAG).wait()
        elif side in self._raw:
            self._raw[side].sendall(payload.numpy().data)
        elif "ring" in side and payload.nbytes > ACK_BYTES:
            room = self._ring.allocate(payload.nbytes)
            if room is None:
                raise RuntimeError("the other end has not read what it was lent")
            if side == "filled ring":
                room.copy_(payload)
            self._edges[side].send(Ping(1, Content.PING), room)
        else:
            self._edges[side].send(Ping(1, Content.PING), payload)

    def _receive(self, side: Side, into: Tensor) -> None:
        if side == "gloo":
            self._group.recv([into], self._other, _TAG).wait()
        elif side in self._raw:
            view = into.numpy().data
            while view:
                view = view[self._raw[side].recv_into(view) :]
        else:
            self._expect("Arrived")

    def _expect(self, kind: str) -> None:
        item = self._inbox.get(timeout=_TIMEOUT_S)
        if type(item).__name__ != kind:
            raise RuntimeError(f"{kind} was expected of the edge, which said {item}")


def _gloo(store: Path, rank: int) -> Any:
    from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout, options._threads = timedelta(seconds=600), 1
    return ProcessGroupGloo(FileStore(str(store), 2), rank, 2, options)


def _connected(meeting: Path, rank: int) -> socket.socket:
    """A TCP connection over the loopback; the first end leaves its port in a file."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            unfinished = meeting.with_suffix(".unfinished")
            unfinished.write_text(str(server.getsockname()[1]))
            unfinished.replace(meeting)
            raw, _ = server.accept()
    else:
        while not meeting.exists():
            time.sleep(0.01)
        raw = socket.create_connection(("127.0.0.1", int(meeting.read_text())))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return raw


def _proved(raw: socket.socket, rank: int, key: bytes) -> socket.socket:
    from planaria.runtime.transport.secure import begin, prove

    tls = begin(raw, key, calling=rank == 1)
    prove(tls, key, _TIMEOUT_S)
    tls.settimeout(None)
    return tls


class Pair:
    """This process's end, and orders to the other."""

    def __init__(self, end: End, orders: Connection) -> None:
        self._end, self._orders = end, orders

    def transfer(self, side: Side, size: int, count: int) -> float:
        """Seconds of one round trip, the mean of ``count``: ``size`` bytes there, eight back."""
        self._orders.send((side, size, count))
        return self._end.give(side, size, count)

    def spent(self, side: Side, size: int, count: int) -> float:
        """As :meth:`transfer`, but the processor seconds that both ends together spend on one."""
        self._orders.send(("spent", side, size, count))
        began = time.process_time()
        self._end.give(side, size, count)
        return (time.process_time() - began + float(self._orders.recv())) / count

    def link(self, name: str) -> float:
        """Seconds that a new edge between the two takes, the proof of the key included."""
        self._orders.send(("link", name))
        return self._end.link(name)

    def prove(self, number: int) -> float:
        """Seconds that a proof of the key takes, on a new connection."""
        self._orders.send(("prove", number))
        return self._end.prove(number)


@contextmanager
def opened(max_bytes: int) -> Iterator[Pair]:
    """A pair for messages of at most ``max_bytes``."""
    from planaria.runtime.transport.secure import new_key

    context, key = mp.get_context("spawn"), new_key()
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_other, args=(Path(folder), key, max_bytes, theirs), daemon=True)
        process.start()
        try:
            yield Pair(End(Path(folder), 0, key, max_bytes, ours), ours)
        finally:
            ours.send(None)
            process.join(5)


def _other(folder: Path, key: bytes, max_bytes: int, orders: Connection) -> None:
    """The other process: does its part of what it is told, until the orders end."""
    end = End(folder, 1, key, max_bytes, orders)
    while (order := orders.recv()) is not None:
        if order[0] == "link":
            end.link(order[1])
        elif order[0] == "prove":
            end.prove(order[1])
        elif order[0] == "spent":
            began = time.process_time()
            end.take(*order[1:])
            orders.send(time.process_time() - began)
        else:
            end.take(*order)
