"""Address of a listener, for processes of the same machine and of other machines.

An address is ``HOST:PORT`` if both use the same one. Otherwise it is three words: the address on its own machine, the
address for others (``-``: only through the relay), and the machine's name.
"""

from __future__ import annotations

from typing import NamedTuple


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
