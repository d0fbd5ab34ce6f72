"""Addresses that processes announce and connect to, for the same machine and for other machines.

An address is ``HOST:PORT`` if both use the same one. Otherwise it is three words: the address on its own machine, the
address for others (``-``: only through the relay), and the machine's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

RELAY = "relay"
"""value instead of HOST:PORT: both ends connect to the controller, which forwards their bytes"""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""a listener at all addresses of its machine → its address on that machine"""


class Address(NamedTuple):
    """The address of a process's listener."""

    inside: str
    """HOST:PORT for processes of its machine"""
    outside: str
    """HOST:PORT for other machines; empty: only through the relay"""
    machine: str

    def __str__(self) -> str:
        if self.inside == self.outside:
            return self.inside
        return f"{self.inside} {self.outside or '-'} {self.machine or '-'}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``str(address)``; other text becomes an unreachable HOST:PORT."""
        match text.split(" "):
            case [inside, outside, machine]:
                return cls(inside, "" if outside == "-" else outside, "" if machine == "-" else machine)
        return cls(text, text, "")


def should_listen(first: str, second: str) -> bool:
    """Return whether the first of two processes should wait for the second to connect an edge.

    The reachable one waits; the first if both or neither are reachable, or both are on one machine.
    """
    first_address, second_address = Address.parse(first), Address.parse(second)
    return bool(first_address.outside) or not second_address.outside or first_address.machine == second_address.machine


@dataclass(frozen=True)
class Reach:
    """Addresses at which others connect to a machine, and the relay for those that cannot."""

    machine: str = ""
    """name in the run; empty: the controller's machine"""
    advertise: str = ""
    """host name or address for other machines; default: that of its listeners"""
    reachable: bool = True
    """whether others can connect to it; false behind a router that only allows outgoing connections (NAT)"""
    ports: tuple[int, int] | None = None
    """first and last port for its workers' listeners; default: any free one"""
    relay: str = ""
    """HOST:PORT of the controller as a relay; empty: none"""


REACHABLE = Reach()
"""reach of a machine to which others connect at its listeners' addresses"""


def listening(host: str, port: int, reach: Reach) -> Address:
    """Return the address of a listener at ``host``:``port`` of a machine with this ``reach``."""
    inside = host_port(_WILDCARDS.get(host, host), port)
    if not reach.reachable:
        return Address(inside, "", reach.machine)
    return Address(inside, host_port(reach.advertise or host, port), reach.machine)


def host_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial_addresses(text: str, reach: Reach) -> tuple[str, ...]:
    """Return HOST:PORT or :data:`RELAY` in the order in which a process with this ``reach`` tries them."""
    at = Address.parse(text)
    if at.inside != at.outside and at.machine == reach.machine:
        return (at.inside,)
    direct = (at.outside,) if at.outside else ()
    return (*direct, RELAY) if reach.relay else direct
