"""Would shared memory between processes of one machine pay? Processor time of a large frame, both ends together.

Today a frame is copied into the kernel and out of it again, into recycled memory. Against that: one copy into a mapped
file of /dev/shm, which is recycled too, a short message through the same socket, and a tensor over the receiver's own
mapping of it. Beside it what a block stage of one layer computes with such a frame, forward and backward, on one
thread. Shared memory would pay where the processor time that it saves is at least 2 % of that; nothing is claimed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.common import Row, conclude, parser, start
from planaria.common.memory_pool import MemoryPool
from planaria.config.schema import ModelConfig
from planaria.models.stages import BlockStage
from planaria.runtime.transport.channel import Closed, Plain
from planaria.runtime.transport.wire import HEADER_BYTES, as_bytes

NAME = "shared_memory"
SHAPES = {1: (512, 512), 4: (1024, 1024), 32: (2048, 4096)}
"""MB of a frame → the width of the model, and tokens in a microbatch"""


def cpu_s(act: Callable[[], object], times: int) -> float:
    """Processor seconds of ``act``, the mean after one for warming up."""
    act()
    began = time.process_time()
    for _ in range(times):
        act()
    return (time.process_time() - began) / times


def line() -> tuple[Plain, Plain]:
    """A connection as edges of one machine have it, both ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        calling = socket.create_connection(server.getsockname())
        called, _ = server.accept()
    calling.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Plain(calling), Plain(called)


def carry(ends: tuple[Plain, Plain], header: memoryview, payload: memoryview, into: memoryview) -> None:
    """Send and receive a frame, by turns."""
    sender, receiver = ends
    while into:
        if header or payload:
            sent = sender.write_some(header, payload)
            header, payload = header[sent:], payload[max(0, sent - len(header)) :]
        got = receiver.read_some(into)
        if got is None:
            continue
        if not got:
            raise Closed
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
    """Processor seconds of one layer's forward and backward pass, by which two frames leave."""
    torch.set_num_threads(1)
    config = ModelConfig(vocab=8, dim=width, layers=1, heads=8, hidden=width * 11 // 4, context=512)
    stage = BlockStage(config, range(1))
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(tokens // 512, 512, width, requires_grad=True)
    return cpu_s(lambda: stage(x).sum().backward(), 1) / 2


def row_of(given: argparse.Namespace, megabytes: int) -> Row:
    size, (width, tokens) = megabytes << 20, SHAPES[megabytes]
    times = max(4, given.megabytes // megabytes)
    pairs = [(by_socket(size, times), by_memory(size, times)) for _ in range(given.repeats)]
    whole = computing(width, tokens)
    shares = [(socket_s - memory_s) / whole for socket_s, memory_s in pairs]
    sockets, memories = zip(*pairs, strict=True)
    beside = {
        "socket": f"{min(sockets) * 1e3:.2f} ms",
        "shared": f"{min(memories) * 1e3:.2f} ms",
        "a pass": f"{whole * 1e3:.0f} ms",
    }
    return Row(f"{megabytes} MB, width {width}, {tokens} tokens", shares, "0.02, from where it would pay", None, beside)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--megabytes", type=int, default=1024, help="that are moved in one repeat")
    flags.add_argument("--repeats", type=int, default=5)
    given = flags.parse_args()
    notes = ["measured: processor time saved by shared memory / that of a pass; one thread"]
    return conclude(NAME, given, [row_of(given, megabytes) for megabytes in SHAPES], notes)


if __name__ == "__main__":
    start(main)
