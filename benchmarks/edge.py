"""Transport between two processes: an edge compared with raw connections, and what shared memory would save."""

from __future__ import annotations

import mmap
import os
import socket
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, interleaved, ratios, start
from benchmarks.processes import Both, two_ends
from planaria.common.memory_pool import MemoryPool
from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import BlockStage
from planaria.runtime.transport import channel
from planaria.runtime.transport.channel import ChannelClosed, LocalChannel
from planaria.runtime.transport.edge import Edge, EdgeOpened, EdgeSpec, FrameArrived
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.ring import Ring, Rings
from planaria.runtime.transport.secure import begin, new_key, prove
from planaria.runtime.transport.wire import HEADER_BYTES, FrameContent, Ping, as_bytes

_TAG, _TIMEOUT_S = 7, 30.0
Side = Literal["gloo", "socket", "edge", "ring", "filled ring", "raw tls", "edge tls"]
SIDES: tuple[Side, ...] = ("gloo", "socket", "edge", "ring", "filled ring", "raw tls", "edge tls")
ACK_BYTES = 8
SLOTS = 2


class End:
    """One of the two processes."""

    def __init__(self, rank: int, addresses: Connection, folder: Path, key: bytes, max_bytes: int) -> None:
        torch.set_num_threads(1)
        self._rank, self._other, self._key, self._folder = rank, 1 - rank, key, folder
        self._port, self._inbox, self._ring = Port("127.0.0.1", key), Inbox(), Ring(SLOTS, max_bytes)
        self._port.rings = Rings(self._ring)
        addresses.send(self._port.address)
        self._there = addresses.recv()
        self._group = _gloo(folder / "store", rank)
        self._raw = {
            "socket": _connected(folder / "socket", rank),
            "raw tls": _proved(_connected(folder / "tls", rank), rank, key),
        }
        self._edges = {name: self._edge(name, max_bytes) for name in ("edge", "ring", "filled ring", "edge tls")}
        self._buffer, self._ack = torch.zeros(max_bytes, dtype=torch.uint8), torch.zeros(ACK_BYTES, dtype=torch.uint8)

    def trip(self, side: Side, size: int, count: int) -> float:
        """Make ``count`` round trips, ``size`` bytes there and eight back; return the mean seconds."""
        payload, began = self._buffer[:size], time.monotonic()
        for _ in range(count):
            if self._rank == 0:
                self._send(side, payload)
                self._receive(side, self._ack)
            else:
                self._receive(side, payload)
                self._send(side, self._ack)
        return (time.monotonic() - began) / count

    def spent(self, side: Side, size: int, count: int) -> float:
        """As :meth:`trip`, in processor seconds of this end."""
        began = time.process_time()
        self.trip(side, size, count)
        return (time.process_time() - began) / count

    def link(self, name: str) -> float:
        began = time.monotonic()
        edge = self._edge(name, 1 << 20)
        took = time.monotonic() - began
        edge.abandon()
        return took

    def _edge(self, name: str, max_bytes: int) -> Any:
        inside = channel.meet_here  # type: ignore[attr-defined]
        channel.meet_here = inside if name != "edge tls" else lambda tls: None  # type: ignore[attr-defined]
        at = self._there if self._rank else ""
        edge = Edge(EdgeSpec(name, at, self._other, max_bytes, _TIMEOUT_S), self._port, self._inbox)
        self._expect(EdgeOpened)
        channel.meet_here = inside  # type: ignore[attr-defined]
        return edge

    def _send(self, side: Side, payload: Tensor) -> None:
        if side == "gloo":
            self._group.send([payload], self._other, _TAG).wait()
        elif side in self._raw:
            self._raw[side].sendall(payload.numpy().data)
        elif "ring" in side and payload.nbytes > ACK_BYTES:
            room = self._ring.allocate(payload.nbytes)
            if room is None:
                raise RuntimeError("the other end has not read its slots")
            if side == "filled ring":
                room.copy_(payload)
            self._edges[side].send(Ping(1, FrameContent.PING), room)
        else:
            self._edges[side].send(Ping(1, FrameContent.PING), payload)

    def _receive(self, side: Side, into: Tensor) -> None:
        if side == "gloo":
            self._group.recv([into], self._other, _TAG).wait()
        elif side in self._raw:
            view = into.numpy().data
            while view:
                view = view[self._raw[side].recv_into(view) :]
        else:
            self._expect(FrameArrived)

    def _expect(self, kind: type) -> None:
        item = self._inbox.get(timeout=_TIMEOUT_S)
        if not isinstance(item, kind):
            raise RuntimeError(f"expected {kind.__name__} from the edge, got {item}")


def _gloo(store: Path, rank: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout, options._threads = timedelta(seconds=600), 1
    return ProcessGroupGloo(FileStore(str(store), 2), rank, 2, options)


def _connected(meeting: Path, rank: int) -> socket.socket:
    """Connect over loopback; the first end writes its port to a file."""
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
    tls = begin(raw, key, calling=rank == 1)
    prove(tls, key, _TIMEOUT_S)
    tls.settimeout(None)
    return tls


@contextmanager
def opened(max_bytes: int) -> Iterator[Both]:
    """Yield calls of both ends, for messages of at most ``max_bytes``."""
    with tempfile.TemporaryDirectory() as folder, two_ends(End, Path(folder), new_key(), max_bytes) as (_, both):
        yield both


HERE, BEYOND = Claim(low=0.95), Claim(low=0.8)
RING, RING_CPU = Claim(low=3.0), Claim(high=0.5)
KB = 1024


def rows(size: int, took: Mapping[Side, Sequence[float]]) -> list[Row]:
    """Rows for messages of ``size`` bytes, from the seconds of round trips by side."""
    what = f"{size // KB} KB" if size < KB * KB else f"{size // KB // KB} MB"
    usual = {side: statistics.median(times) for side, times in took.items()}
    best: Side = "gloo" if usual["gloo"] < usual["socket"] else "socket"
    found = []
    compared: list[tuple[str, Side, Side, Claim]] = [
        (what, best, "edge", HERE),
        (f"{what}, TLS", "raw tls", "edge tls", BEYOND),
    ]
    for name, raw, edge, claim in compared:
        columns = {f"{side} ms": 1000 * usual[side] for side in SIDES if ("tls" in side) == ("tls" in edge)}
        found.append(Row(name, ratios(took[raw], took[edge]), f"{raw} itself: 1", claim, columns))
    return found


def ring_rows(size: int, took: Mapping[Side, Sequence[float]], spent: Sequence[Sequence[float]]) -> list[Row]:
    """Rows for the ring over the edge's socket, from seconds and processor seconds."""
    what, socket_cpu, ring_cpu = f"{size // KB // KB} MB, ring / edge", *map(statistics.median, spent)
    plain, filled = (ratios(took["edge"], took[side]) for side in ("ring", "filled ring"))
    cpu = ratios(spent[1], spent[0])
    return [
        Row(f"{what}: bandwidth", plain, "none: no copy", RING),
        Row(f"{what}: bandwidth, filled by a processor", filled, "none: one copy"),
        Row(f"{what}: CPU", cpu, "> 0", RING_CPU, {"edge ms": 1000 * socket_cpu, "ring ms": 1000 * ring_cpu}),
    ]


@benchmark(
    "edge",
    sizes=Flag([64, 1024, 4096, 32768], "message sizes", metavar="KB"),
    volume=Flag(64, "sent in one repeat; at most 256 messages", metavar="MB"),
    repeats=Flag(15, "of each side and size"),
)
def run_edge(args: Namespace) -> Measurement:
    """Measure round trips over an edge compared with raw connections between the same processes.

    A payload is answered by eight bytes, over gloo, a Python socket and an edge, and over TLS 1.3 and an edge between
    machines (inside TLS), in turns. Claims: an edge keeps at least 95 % of the better of gloo and socket; between
    machines 80 % of raw TLS.

    GPU stages copy a frame into host memory: into a ring that both ends map (``ring``) or into the sender's own memory
    (``edge``). Claims for the largest message: a ring carries at least three times an edge's bandwidth with at most
    half of both ends' processor time. ``filled ring`` adds the copy of a sender without a device.
    """
    found: list[Row] = []
    with opened(max(args.sizes) * KB) as both:
        for size in (kilobytes * KB for kilobytes in args.sizes):
            count = min(256, max(4, args.volume * KB * KB // size))
            sides = [lambda n=count, s=size, side=side: both("trip", side, s, n)[0] for side in SIDES]
            interleaved(sides, 1)  # first touches of buffers and sockets
            took = dict(zip(SIDES, interleaved(sides, args.repeats), strict=True))
            found += rows(size, took)
            if size == max(args.sizes) * KB:
                ends = [lambda n=count, s=size, side=side: sum(both("spent", side, s, n)) for side in ("edge", "ring")]
                found += ring_rows(size, took, interleaved(ends, args.repeats))
    return Result(found, ["measured: the raw side's round trip over the edge's, in the same repeat"])


SHAPES = {1: (512, 512), 4: (1024, 1024), 32: (2048, 4096)}  # MB of a frame → model width, tokens per microbatch


def cpu_s(act: Callable[[], object], times: int) -> float:
    act()
    began = time.process_time()
    for _ in range(times):
        act()
    return (time.process_time() - began) / times


def line() -> tuple[LocalChannel, LocalChannel]:
    """Return both ends of a connection as used by edges of one machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        calling = socket.create_connection(server.getsockname())
        called, _ = server.accept()
    calling.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return LocalChannel(calling), LocalChannel(called)


def carry(ends: tuple[LocalChannel, LocalChannel], header: memoryview, payload: memoryview, into: memoryview) -> None:
    """Send and receive a frame in turns."""
    sender, receiver = ends
    while into:
        if header or payload:
            sent = sender.write_some(header, payload)
            header, payload = header[sent:], payload[max(0, sent - len(header)) :]
        got = receiver.read_some(into)
        if got is None:
            continue
        if not got:
            raise ChannelClosed
        into = into[got:]


def by_socket(size: int, times: int) -> float:
    ends, pool = line(), MemoryPool(64 << 20)
    header, payload = memoryview(bytes(HEADER_BYTES)), as_bytes(torch.ones(size, dtype=torch.uint8))
    return cpu_s(lambda: carry(ends, header, payload, as_bytes(pool.take(HEADER_BYTES + size))), times)


def by_memory(size: int, times: int) -> float:
    ends, payload = line(), torch.ones(size, dtype=torch.uint8)
    header, into = memoryview(bytes(HEADER_BYTES)), memoryview(bytearray(HEADER_BYTES))
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.truncate(file.fileno(), size)
        here, there = (torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8) for _ in range(2))

        def once() -> None:
            here.copy_(payload)
            carry(ends, header, memoryview(b""), into)
            there.view(torch.float32)

        return cpu_s(once, times)


def computing(width: int, tokens: int) -> float:
    """Return the processor seconds of one layer's forward and backward pass per frame."""
    torch.set_num_threads(1)
    config = ModelConfig(vocab=8, dim=width, layers=1, heads=8, hidden=width * 11 // 4, context=512)
    stage = BlockStage(config, range(1))
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(tokens // 512, 512, width, requires_grad=True)
    return cpu_s(lambda: stage(x).sum().backward(), 1) / 2


def row_of(args: Namespace, megabytes: int) -> Row:
    size, (width, tokens) = megabytes << 20, SHAPES[megabytes]
    times = max(4, args.megabytes // megabytes)
    pairs = [(by_socket(size, times), by_memory(size, times)) for _ in range(args.repeats)]
    whole = computing(width, tokens)
    shares = [(socket_s - memory_s) / whole for socket_s, memory_s in pairs]
    sockets, memories = zip(*pairs, strict=True)
    columns = {
        "socket": f"{min(sockets) * 1e3:.2f} ms",
        "shared": f"{min(memories) * 1e3:.2f} ms",
        "a pass": f"{whole * 1e3:.0f} ms",
    }
    return Row(
        f"{megabytes} MB, width {width}, {tokens} tokens", shares, "0.02, from where it would pay", None, columns
    )


@benchmark("shared_memory", megabytes=Flag(1024, "that are moved in one repeat"), repeats=5)
def run_shared_memory(args: Namespace) -> Measurement:
    """Measure the processor time that shared memory would save for a large frame, both ends together.

    An edge copies a frame into the kernel and out again, into recycled memory. The alternative copies once into a
    mapped, recycled file of /dev/shm, sends a short message and maps a tensor over it. Both are compared with one
    layer's forward and backward pass on one thread. It would pay from 2 % of a pass; no claim.
    """
    notes = ["measured: processor time saved by shared memory / that of a pass; one thread"]
    return Result([row_of(args, megabytes) for megabytes in SHAPES], notes)


if __name__ == "__main__":
    start(edge=run_edge, shared_memory=run_shared_memory)
