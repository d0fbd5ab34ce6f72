"""Where a process of a run listens, as its own machine and other machines reach it.

On one machine, or where all machines see each other under the same addresses, an address is ``HOST:PORT``. Where they
do not, it is three words: how processes of its own machine reach it, how others do (``-``: through the relay alone),
and which machine that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

RELAY = "relay"
"""in place of HOST:PORT: the two ends meet at the controller, which carries their bytes"""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""a listener at all addresses of its machine, and where its own processes find it"""


@dataclass(frozen=True)
class Reach:
    """How a machine is reached, and how it reaches others."""

    machine: str = ""
    """its name in the run; empty: the controller's"""
    advertise: str = ""
    """host name or address under which other machines find it; that of its listeners unless given"""
    reachable: bool = True
    """can others open connections to it? Not behind a router that only lets connections out (NAT)"""
    ports: tuple[int, int] | None = None
    """the first and the last port at which its workers may listen; any free one unless given"""
    relay: str = ""
    """HOST:PORT of the controller, where ends meet that cannot reach each other; empty: there is no such way"""


REACHABLE = Reach()
"""of a machine that others reach under the address at which it listens"""


class Address(NamedTuple):
    """Where one process listens."""

    inside: str
    """HOST:PORT for processes of its machine"""
    outside: str
    """HOST:PORT for those of other machines; empty: through the relay alone"""
    machine: str

    def __str__(self) -> str:
        if self.inside == self.outside:
            return self.inside
        return f"{self.inside} {self.outside or '-'} {self.machine or '-'}"


def parse(text: str) -> Address:
    """The address that ``str(address)`` wrote; anything else is taken for HOST:PORT, which nobody will find."""
    match text.split(" "):
        case [inside, outside, machine]:
            return Address(inside, "" if outside == "-" else outside, "" if machine == "-" else machine)
    return Address(text, text, "")


def listening(host: str, port: int, reach: Reach) -> Address:
    """The address of a process that listens at ``host``:``port`` of a machine with this ``reach``."""
    inside = joined(_WILDCARDS.get(host, host), port)
    if not reach.reachable:
        return Address(inside, "", reach.machine)
    return Address(inside, joined(reach.advertise or host, port), reach.machine)


def joined(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ways(text: str, reach: Reach) -> tuple[str, ...]:
    """HOST:PORT or :data:`RELAY`, in the order in which a process with this ``reach`` tries them for an address."""
    at = parse(text)
    if at.inside != at.outside and at.machine == reach.machine:
        return (at.inside,)
    direct = (at.outside,) if at.outside else ()
    return (*direct, RELAY) if reach.relay else direct


def waits_best(first: str, second: str) -> bool:
    """Of two processes that are to share an edge: should the first wait to be called, rather than the second?

    The one that others can reach waits; the first where both or neither can be reached, or both are on one machine.
    """
    one, other = parse(first), parse(second)
    return bool(one.outside) or not other.outside or one.machine == other.machine
