"""Carries packets between the hosts of ``netns.py``: a separate process, since the tests' is too busy.

``python carrier.py CAPTURE ADDRESS=DEVICE[=PRIVATE]…`` takes the file descriptors of the hosts' TUN devices, and writes
every packet to the file CAPTURE. A host with a PRIVATE address is behind a router that
translates it to ADDRESS, and lets in answers alone. A line ``ADDRESS LATENCY_S JITTER_S LOSS WAY`` on its stdin
changes a host's link from now on (WAY: both, in or out); the answer is how many packets the link has lost so far.
It ends with its stdin.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import BinaryIO

_MAX_PACKET = 1 << 16
_TCP = 6


@dataclass
class _Link:
    """A host's only link, and its effect on every packet."""

    address: str
    device: int
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    lossy: str = "both"
    """which way packets vanish: both, in or out"""
    lost: int = 0
    private: str = ""
    """the host's own address, if its router translates it"""
    answers: set[bytes] = field(default_factory=set)
    """where answers to its packets come from, and the port that they are for"""

    def out(self, packet: bytes) -> bytes:
        """Return a packet of the host as its router forwards it; the router records the receiver."""
        if not self.private:
            return packet
        self.answers.add(packet[16:20] + _ports(packet)[2:4] + _ports(packet)[:2])
        return _readdressed(packet, 12, self.address)

    def in_(self, packet: bytes) -> bytes | None:
        """Return a packet for the host as its router forwards it, or None if it answers nothing."""
        if not self.private:
            return packet
        asked = packet[12:16] + _ports(packet) in self.answers
        return _readdressed(packet, 16, self.private) if asked else None


def carry(links: list[_Link], capture: BinaryIO) -> None:
    """Until stdin ends. Packets of one host to another keep their order."""
    rng, order, wires = random.Random(34107), count(), {link.device: link for link in links}
    by_address = {link.address: link for link in links}
    under_way: list[tuple[float, int, int, bytes]] = []
    """when it arrives, a counter for those of one moment, where, and what"""
    latest: dict[tuple[str, str], float] = {}
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready = select.select([*wires, sys.stdin], [], [], patience)[0]
        if sys.stdin in ready:
            if not (line := sys.stdin.readline()):
                return
            capture.flush()
            _change(by_address, line)
        for device in wires.keys() & set(ready):
            source = wires[device]
            packet = source.out(os.read(device, _MAX_PACKET))
            capture.write(packet)
            target = by_address.get(_target(packet))
            if target is None or (inside := target.in_(packet)) is None:
                continue
            packet = inside
            delay = _delay(source, target, rng)
            if delay is not None:
                way = (source.address, target.address)
                latest[way] = max(latest.get(way, 0.0), time.monotonic() + delay)
                heapq.heappush(under_way, (latest[way], next(order), target.device, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(under_way)
            with suppress(BlockingIOError):  # the queue there is full: lost, as on any link
                os.write(device, packet)


def _change(links: dict[str, _Link], line: str) -> None:
    address, *numbers, lossy = line.split()
    link = links[address]
    link.lossy = lossy
    link.latency_s, link.jitter_s, link.loss = map(float, numbers)
    print(link.lost, flush=True)


def _delay(source: _Link, target: _Link, rng: random.Random) -> float | None:
    """Seconds that a packet takes; None when it vanishes."""
    for link, way in ((source, "out"), (target, "in")):
        if link.lossy in ("both", way) and rng.random() < link.loss:
            link.lost += 1
            return None
    return sum(link.latency_s + rng.random() * link.jitter_s for link in (source, target))


def _target(packet: bytes) -> str:
    """The address that an IPv4 packet is for; nothing for any other."""
    return ".".join(map(str, packet[16:20])) if packet[0] >> 4 == 4 else ""


def _ports(packet: bytes) -> bytes:
    """The ports of a TCP or UDP packet, from and to: 4 bytes."""
    begin = 4 * (packet[0] & 15)
    return packet[begin : begin + 4]


def _readdressed(packet: bytes, at: int, address: str) -> bytes:
    """The IPv4 packet with another address at byte ``at`` (12: from, 16: to), and checksums that fit (RFC 1624)."""
    new, changed = bytes(map(int, address.split("."))), bytearray(packet)
    before, changed[at : at + 4] = packet[at : at + 4], new
    checksums = [10]
    if packet[9] == _TCP:
        checksums.append(4 * (packet[0] & 15) + 16)
    for place in checksums:
        total = ~int.from_bytes(packet[place : place + 2], "big") & 0xFFFF
        for half in (0, 2):
            total += (~int.from_bytes(before[half : half + 2], "big") & 0xFFFF) + int.from_bytes(
                new[half : half + 2], "big"
            )
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        changed[place : place + 2] = (~total & 0xFFFF).to_bytes(2, "big")
    return bytes(changed)


if __name__ == "__main__":
    ends = [argument.split("=") for argument in sys.argv[2:]]
    with Path(sys.argv[1]).open("wb") as file:
        carry([_Link(address, int(device), private="".join(private)) for address, device, *private in ends], file)
