"""A small internet on one machine: hosts that are network namespaces, and links as bad as a test wants them.

A host's only way out is a TUN device. What its processes send comes out at this end, where ``carrier.py`` holds it
back, drops it, or hands it on to the host it is for. That takes no module of the kernel for bad links (tc's netem is
often missing), and no address of the machine itself: two such networks never meet.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Literal

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PRIVATE = "192.168.7.2"
"""of every host behind a router: such addresses mean nothing elsewhere"""
_DEVICE = Path("/dev/net/tun")
_numbers = count(1)


class NotAllowedError(Exception):
    """This machine, or its user, cannot have such a network; why not."""


@dataclass(frozen=True)
class Weather:
    """What a host's link does to every packet, on its way in as on its way out."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    """added at random, between nothing and this; packets keep their order"""
    loss: float = 0.0
    """share of packets that vanish; 1: the host is cut off"""
    lossy: Literal["both", "in", "out"] = "both"
    """which way packets vanish"""


FINE, CUT_OFF = Weather(), Weather(loss=1.0)


@dataclass(frozen=True)
class Host:
    """A network namespace with one address."""

    name: str
    address: str
    carrier: subprocess.Popen[str]

    @property
    def prefix(self) -> list[str]:
        """What to put before a command to have it run on this host."""
        return ["ip", "netns", "exec", self.name]

    def link(self, weather: Weather) -> int:
        """Let its link be like this from now on; how many packets the link has lost so far."""
        words, answers = _pipes(self.carrier)
        print(self.address, weather.latency_s, weather.jitter_s, weather.loss, weather.lossy, file=words, flush=True)
        return int(answers.readline())


@contextmanager
def own_loopback() -> Iterator[str]:
    """A namespace with a loopback device alone, by its name; what runs there at the end is killed.

    :raises NotAllowedError: when this machine, or its user, cannot have it.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NotAllowedError("network namespaces need root, and `ip` (iproute2)")
    name = _name(f"lo.{os.getpid()}.{next(_numbers)}")
    try:
        _ip(f"netns add {name}")
    except OSError as error:
        raise NotAllowedError(f"no network namespaces here: {error}") from None
    try:
        _ip(f"-n {name} link set lo up")
        yield name
    finally:
        _end(name)


@contextmanager
def network(hosts: int, capture: Path = Path(os.devnull), hidden: Collection[int] = ()) -> Iterator[list[Host]]:
    """Yield hosts that can reach each other; their processes are killed at the end. ``capture`` gets all packets.

    The ``hidden`` ones, by their place in the list, are behind routers (NAT): they cannot be called.

    :raises NotAllowedError: when this machine, or its user, cannot have it.
    """
    if os.geteuid() != 0:
        raise NotAllowedError("network namespaces need root")
    if shutil.which("ip") is None:
        raise NotAllowedError("network namespaces need `ip` (iproute2)")
    with ExitStack() as ending:
        addresses = {f"{os.getpid()}.{next(_numbers)}": f"10.77.0.{last}" for last in range(1, hosts + 1)}
        own = {at: _PRIVATE if place in hidden else at for place, at in enumerate(addresses.values())}
        try:
            devices = {at: ending.enter_context(_namespace(number, own[at])) for number, at in addresses.items()}
        except OSError as error:
            raise NotAllowedError(f"no network namespaces here: {error}") from None
        carrier = ending.enter_context(_carrier(devices, own, capture))
        yield [Host(_name(number), address, carrier) for number, address in addresses.items()]


def _name(number: str) -> str:
    return f"planaria-{number}"


@contextmanager
def _namespace(number: str, address: str) -> Iterator[int]:
    """A host, as the file descriptor of its device; it goes with all its processes.

    :raises OSError: when something that it takes is not there, or not allowed.
    """
    name, device, descriptor = _name(number), f"pl{number}", -1
    _ip(f"netns add {name}")
    try:
        descriptor = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip(f"link set {device} netns {name}")
        _ip(f"-n {name} addr add {address}/24 dev {device}")
        _ip(f"-n {name} link set lo up")
        _ip(f"-n {name} link set {device} up")
        if address == _PRIVATE:
            _ip(f"-n {name} route add default dev {device}")
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # the device goes with it
        _end(name)


def _end(name: str) -> None:
    """Remove a namespace and kill its processes."""
    for process in _ip(f"netns pids {name}").split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    _ip(f"netns del {name}")


def _ip(arguments: str) -> str:
    """:raises OSError: when the command fails, with what it says."""
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`ip {arguments}`: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _carrier(devices: dict[str, int], own: dict[str, str], capture: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that carries packets between the devices of these addresses."""
    ends = [
        f"{address}={device}" + (f"={own[address]}" if own[address] != address else "")
        for address, device in devices.items()
    ]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("carrier.py")), str(capture), *ends],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=tuple(devices.values()),
    )  # fmt: skip
    try:
        yield process
    finally:
        for pipe in _pipes(process):
            pipe.close()
        process.wait(10)


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Its stdin and stdout."""
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def output_of(guest: subprocess.Popen[str]) -> list[str]:
    """Wait for a guest to end with exit code 0; return its output lines."""
    output, _ = guest.communicate(timeout=60)
    assert guest.returncode == 0, output
    return output.splitlines()
