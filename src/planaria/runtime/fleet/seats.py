"""Which reserved places are free, and where they are. Plain bookkeeping: whoever reserves tells it what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_REST_S = 5.0
"""a seat that rests for longer is not waited for: its node may be dead, and Ray slow to notice"""


class Seat(NamedTuple):
    """Room for one worker: a bundle of a placement group."""

    group: int
    bundle: int


@dataclass
class _State:
    node: str | None = None
    """None while the cluster has no room for it"""
    use: str = "free"
    """free, taken, or resting: its worker is gone, but nobody knows yet whether its node is well"""
    since: float = field(default_factory=time.monotonic)


class Seats:
    """The seats of one run."""

    def __init__(self) -> None:
        self._seats: dict[Seat, _State] = {}
        self.shunned: set[str] = set()
        """nodes on which nobody may be seated"""

    def placed(self, group: int, nodes: Mapping[int, str | None]) -> None:
        """Where a group's seats are now; a seat that has moved lies on a living node, so it rests no longer."""
        for bundle, node in nodes.items():
            state = self._seats.setdefault(Seat(group, bundle), _State())
            if state.node != node:
                state.node = node
                if state.use == "resting":
                    self.free(Seat(group, bundle))

    def forget(self, group: int) -> None:
        """The group's reservation was given back."""
        self._seats = {seat: state for seat, state in self._seats.items() if seat.group != group}

    def take(self) -> tuple[Seat, str] | None:
        """A free seat on the node with the fewest workers, and that node; None when there is none now."""
        crowd = Counter(state.node for state in self._seats.values() if state.use == "taken")
        best: tuple[int, Seat, str] | None = None
        for seat, state in self._seats.items():
            if self._usable(state) and state.use == "free" and state.node is not None:
                offer = (crowd[state.node], seat, state.node)
                best = offer if best is None else min(best, offer)
        if best is None:
            return None
        self._use(best[1], "taken")
        return best[1], best[2]

    def rest(self, seat: Seat) -> None:
        """Its worker is gone."""
        self._use(seat, "resting")

    def free(self, seat: Seat) -> None:
        """It may be taken again."""
        self._use(seat, "free")

    def resting_at(self, seat: Seat) -> str | None:
        """The node of a seat that rests; None when it does not, or no longer."""
        state = self._seats.get(seat)
        return state.node if state is not None and state.use == "resting" else None

    def nodes(self) -> list[str]:
        """Nodes with seats."""
        return sorted({state.node for state in self._seats.values() if state.node is not None})

    def to_come(self) -> int:
        """Seats that are free, or will soon be: the cluster looks for room, or a node is asked whether it is well."""
        long_ago = time.monotonic() - _REST_S
        return sum(
            self._usable(s) and (s.use == "free" or (s.use == "resting" and s.since > long_ago))
            for s in self._seats.values()
        )

    def idle(self, seconds: float) -> list[int]:
        """Groups, other than the first, of which no seat has been in use for so long."""
        now = time.monotonic()
        busy = {q.group for q, s in self._seats.items() if s.use != "free" or now - s.since < seconds}
        return sorted({seat.group for seat in self._seats} - busy - {0})

    def _usable(self, state: _State) -> bool:
        return state.node not in self.shunned

    def _use(self, seat: Seat, use: str) -> None:
        if seat in self._seats:
            self._seats[seat].use, self._seats[seat].since = use, time.monotonic()
