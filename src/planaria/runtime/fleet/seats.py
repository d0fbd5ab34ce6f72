"""Bookkeeping of reserved seats: which are free, and on which nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_REST_S = 5.0
"""seconds after which a resting seat is not waited for, since its node may be dead"""


class Seat(NamedTuple):
    """Room for one worker: a bundle of a placement group."""

    group: int
    bundle: int


@dataclass
class _State:
    node: str | None = None
    """None while the cluster has no room for it"""
    use: str = "free"
    """free, taken, or resting: its worker has ended, and its node has not answered since"""
    since: float = field(default_factory=time.monotonic)


class Seats:
    """The seats of one run."""

    def __init__(self) -> None:
        self._seats: dict[Seat, _State] = {}
        self.shunned: set[str] = set()
        """nodes without new workers"""

    def placed(self, group: int, nodes: Mapping[int, str | None]) -> None:
        """Update the nodes of a group's seats; a seat that has moved is on a live node and becomes free."""
        for bundle, node in nodes.items():
            state = self._seats.setdefault(Seat(group, bundle), _State())
            if state.node != node:
                state.node = node
                if state.use == "resting":
                    self.free(Seat(group, bundle))

    def forget(self, group: int) -> None:
        """Remove a group whose reservation was returned."""
        self._seats = {seat: state for seat, state in self._seats.items() if seat.group != group}

    def take(self) -> tuple[Seat, str] | None:
        """Take a free seat on the node with the fewest workers; return it and the node, or None."""
        crowd = Counter(state.node for state in self._seats.values() if state.use == "taken")
        best: tuple[int, Seat, str] | None = None
        for seat, state in self._seats.items():
            if self._usable(state) and state.use == "free" and state.node is not None:
                candidate = (crowd[state.node], seat, state.node)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        self._use(best[1], "taken")
        return best[1], best[2]

    def rest(self, seat: Seat) -> None:
        """Mark a seat whose worker has ended."""
        self._use(seat, "resting")

    def free(self, seat: Seat) -> None:
        """Make a seat available."""
        self._use(seat, "free")

    def resting_at(self, seat: Seat) -> str | None:
        """Return the node of a resting seat; None if it does not rest."""
        state = self._seats.get(seat)
        return state.node if state is not None and state.use == "resting" else None

    def nodes(self) -> list[str]:
        """Return the nodes with seats."""
        return sorted({state.node for state in self._seats.values() if state.node is not None})

    def to_come(self) -> int:
        """Return the number of seats that are free, or will be soon."""
        long_ago = time.monotonic() - _REST_S
        return sum(
            self._usable(s) and (s.use == "free" or (s.use == "resting" and s.since > long_ago))
            for s in self._seats.values()
        )

    def idle(self, seconds: float) -> list[int]:
        """Return the groups, except the first, whose seats have been unused for ``seconds``."""
        now = time.monotonic()
        busy = {q.group for q, s in self._seats.items() if s.use != "free" or now - s.since < seconds}
        return sorted({seat.group for seat in self._seats} - busy - {0})

    def _usable(self, state: _State) -> bool:
        return state.node not in self.shunned

    def _use(self, seat: Seat, use: str) -> None:
        if seat in self._seats:
            self._seats[seat].use, self._seats[seat].since = use, time.monotonic()
