"""A small network on one machine: hosts that are network namespaces, with links of adjustable latency and loss.

A host's only route is a TUN device. The carrier, this file run as a program, reads its packets at the other end, delays
or drops them, and writes them to the device of the receiving host. It is a separate process because tests are too busy.
No kernel module for bad links (tc's netem is often missing) and no address of the machine is used.

With a rate, packets queue for the sender's uplink, then for the receiver's downlink. What would wait longer than
``_QUEUE_S`` in one of them is lost, as at a full home router.

``python netns.py CAPTURE ADDRESS=DEVICE[=PRIVATE]…`` takes the file descriptors of the devices and writes every packet
to CAPTURE. A host with a PRIVATE address is behind a router that translates it to ADDRESS and passes only answers. A
line ``ADDRESS LATENCY_S JITTER_S LOSS RATE LOSSY`` on stdin changes a host's link; the reply is the number of packets
that the link has lost so far. The carrier exits with its stdin.
"""

from __future__ import annotations

import fcntl
import heapq
import math
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, BinaryIO, Literal

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PRIVATE = "192.168.7.2"
"""address of every host behind a router"""
_DEVICE = Path("/dev/net/tun")
_MAX_PACKET, _TCP = 1 << 16, 6
_QUEUE_S = 0.5
_numbers = count(1)


class NotAllowedError(Exception):
    """This machine or user cannot create network namespaces."""


@dataclass(frozen=True)
class Weather:
    """The effect of a host's link on every packet, in both directions."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    """maximum of the random delay added; packets keep their order"""
    loss: float = 0.0
    """share of packets that are lost; 1: the host is cut off"""
    rate: float = math.inf
    """bytes per second, each way"""
    lossy: Literal["both", "in", "out"] = "both"
    """direction in which packets are lost"""


FINE, CUT_OFF = Weather(), Weather(loss=1.0)


@dataclass(frozen=True)
class Host:
    """A network namespace with one address."""

    name: str
    address: str
    carrier: subprocess.Popen[str]

    @property
    def prefix(self) -> list[str]:
        """Words before a command that runs on this host."""
        return ["ip", "netns", "exec", self.name]

    def link(self, weather: Weather) -> int:
        """Change the host's link; return the packets that it has lost so far."""
        words, answers = _pipes(self.carrier)
        numbers = weather.latency_s, weather.jitter_s, weather.loss, weather.rate
        print(self.address, *numbers, weather.lossy, file=words, flush=True)
        return int(answers.readline())


@contextmanager
def own_loopback() -> Iterator[str]:
    """Yield the name of a namespace with a loopback device only; its processes are killed at the end.

    :raises NotAllowedError:
    """
    name = f"planaria-lo.{os.getpid()}.{next(_numbers)}"
    with ExitStack() as ending:
        with _permitted():
            _ip(f"netns add {name}")
            ending.callback(_end, name)
            _ip(f"-n {name} link set lo up")
        yield name


@contextmanager
def network(hosts: int, capture: Path = Path(os.devnull), hidden: Collection[int] = ()) -> Iterator[list[Host]]:
    """Yield hosts that can reach each other; their processes are killed at the end. ``capture`` gets all packets.

    Hosts with an index in ``hidden`` are behind routers (NAT) and accept no connections.

    :raises NotAllowedError:
    """
    with ExitStack() as ending:
        addresses = {f"{os.getpid()}.{next(_numbers)}": f"10.77.0.{last}" for last in range(1, hosts + 1)}
        own = {at: _PRIVATE if place in hidden else at for place, at in enumerate(addresses.values())}
        with _permitted():
            devices = {at: ending.enter_context(_namespace(number, own[at])) for number, at in addresses.items()}
        carrier = ending.enter_context(_carrier(devices, own, capture))
        yield [Host(f"planaria-{number}", address, carrier) for number, address in addresses.items()]


@contextmanager
def _permitted() -> Iterator[None]:
    """:raises NotAllowedError: if the block cannot create namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NotAllowedError("network namespaces need root and `ip` (iproute2)")
    try:
        yield
    except OSError as error:
        raise NotAllowedError(f"no network namespaces here: {error}") from None


@contextmanager
def _namespace(number: str, address: str) -> Iterator[int]:
    """Yield the file descriptor of a new host's device; remove the host and its processes at the end."""
    name, device = f"planaria-{number}", f"pl{number}"
    with ExitStack() as ending:
        _ip(f"netns add {name}")
        ending.callback(_end, name)
        descriptor = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        ending.callback(os.close, descriptor)  # also removes the device
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip(f"link set {device} netns {name}")
        _ip(f"-n {name} addr add {address}/24 dev {device}")
        _ip(f"-n {name} link set lo up")
        _ip(f"-n {name} link set {device} up")
        if address == _PRIVATE:
            _ip(f"-n {name} route add default dev {device}")
        yield descriptor


def _end(name: str) -> None:
    """Remove a namespace and kill its processes."""
    for process in _ip(f"netns pids {name}").split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    _ip(f"netns del {name}")


def _ip(arguments: str) -> str:
    """:raises OSError: if the command fails."""
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`ip {arguments}`: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _carrier(devices: dict[str, int], own: dict[str, str], capture: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the process that carries packets between the devices of these addresses."""
    ends = [f"{at}={device}" + (f"={own[at]}" if own[at] != at else "") for at, device in devices.items()]
    process = subprocess.Popen(
        [sys.executable, __file__, str(capture), *ends],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=tuple(devices.values()),
    )  # fmt: skip
    try:
        yield process
    finally:
        for pipe in _pipes(process):
            pipe.close()
        process.wait(10)


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def output_of(guest: subprocess.Popen[str]) -> list[str]:
    """Wait for a guest's exit with code 0; return its output lines."""
    output, _ = guest.communicate(timeout=60)
    assert guest.returncode == 0, output
    return output.splitlines()


# ---- the carrier's process


@dataclass
class _Link:
    """A host's link, and its router's state."""

    address: str
    device: int
    private: str = ""
    """the host's own address if its router translates it"""
    weather: Weather = FINE
    lost: int = 0
    free: dict[str, float] = field(default_factory=lambda: {"out": 0.0, "in": 0.0})
    """when each direction has carried all its packets"""
    answers: set[bytes] = field(default_factory=set)
    """addresses and ports whose packets answer the host's own"""

    def queue(self, way: Literal["out", "in"], ready: float, size: int) -> float | None:
        """Return when a packet that is ready then has passed in one direction, or None if that queue is full."""
        begin = max(ready, self.free[way])
        if begin - ready > _QUEUE_S:
            self.lost += 1
            return None
        self.free[way] = begin + size / self.weather.rate
        return self.free[way]

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


def _carry(links: list[_Link], capture: BinaryIO) -> None:
    """Carry packets until stdin ends. Packets from one host to another keep their order."""
    rng, order, by_device = random.Random(34107), count(), {link.device: link for link in links}
    by_address = {link.address: link for link in links}
    under_way: list[tuple[float, int, int, bytes]] = []
    """arrival, a counter that breaks ties, device, and packet"""
    latest: dict[tuple[str, str], float] = {}
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready = select.select([*by_device, sys.stdin], [], [], patience)[0]
        if sys.stdin in ready:
            if not (line := sys.stdin.readline()):
                return
            capture.flush()
            address, *numbers, lossy = line.split()
            latency_s, jitter_s, loss, rate = map(float, numbers)
            by_address[address].weather = Weather(latency_s, jitter_s, loss, rate, lossy)  # type: ignore[arg-type]
            print(by_address[address].lost, flush=True)
        for device in by_device.keys() & set(ready):
            source = by_device[device]
            packet = source.out(os.read(device, _MAX_PACKET))
            capture.write(packet)
            target = by_address.get(".".join(map(str, packet[16:20])) if packet[0] >> 4 == 4 else "")
            if target is None or (inside := target.in_(packet)) is None:
                continue
            if (arrival := _arrival(source, target, len(packet), rng)) is not None:
                way = source.address, target.address
                latest[way] = max(latest.get(way, 0.0), arrival)
                heapq.heappush(under_way, (latest[way], next(order), target.device, inside))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(under_way)
            with suppress(BlockingIOError):  # the queue there is full: lost, as on any link
                os.write(device, packet)


def _arrival(source: _Link, target: _Link, size: int, rng: random.Random) -> float | None:
    """Return when a packet sent now arrives, or None if it is lost."""
    for link, way in ((source, "out"), (target, "in")):
        if link.weather.lossy in ("both", way) and rng.random() < link.weather.loss:
            link.lost += 1
            return None
    delay = sum(link.weather.latency_s + rng.random() * link.weather.jitter_s for link in (source, target))
    sent = source.queue("out", time.monotonic(), size)
    return None if sent is None else target.queue("in", sent + delay, size)


def _ports(packet: bytes) -> bytes:
    """Return the source and target port of a TCP or UDP packet, 4 bytes."""
    begin = 4 * (packet[0] & 15)
    return packet[begin : begin + 4]


def _readdressed(packet: bytes, at: int, address: str) -> bytes:
    """Return the packet with another address at byte ``at`` (12: source, 16: target) and new checksums (RFC 1624)."""
    new, changed = bytes(map(int, address.split("."))), bytearray(packet)
    before, changed[at : at + 4] = packet[at : at + 4], new
    for place in [10, *([4 * (packet[0] & 15) + 16] if packet[9] == _TCP else [])]:
        total = ~int.from_bytes(packet[place : place + 2], "big") & 0xFFFF
        for half in (0, 2):
            removed, added = (int.from_bytes(each[half : half + 2], "big") for each in (before, new))
            total += (~removed & 0xFFFF) + added
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        changed[place : place + 2] = (~total & 0xFFFF).to_bytes(2, "big")
    return bytes(changed)


if __name__ == "__main__":
    ends = [argument.split("=") for argument in sys.argv[2:]]
    with Path(sys.argv[1]).open("wb") as file:
        _carry([_Link(address, int(device), "".join(private)) for address, device, *private in ends], file)
