"""Bookkeeping of reserved bundles: which are free, and on which nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_REST_S = 5.0
"""seconds after which a resting bundle is not waited for, since its node may be dead"""


class Bundle(NamedTuple):
    """Room for one worker: a bundle of a placement group, as in Ray."""

    group: int
    number: int


@dataclass
class _State:
    node: str | None = None
    """None while the cluster has no room for it"""
    use: str = "free"
    """free, taken, or resting: its worker has ended, and its node has not answered since"""
    since: float = field(default_factory=time.monotonic)


class Bundles:
    """The bundles of one run."""

    def __init__(self) -> None:
        self._states: dict[Bundle, _State] = {}
        self.avoided_nodes: set[str] = set()
        """nodes without new workers"""

    def placed(self, group: int, nodes: Mapping[int, str | None]) -> None:
        """Update the nodes of a group's bundles; a bundle that has moved is on a live node and becomes free."""
        for number, node in nodes.items():
            state = self._states.setdefault(Bundle(group, number), _State())
            if state.node != node:
                state.node = node
                if state.use == "resting":
                    self.free(Bundle(group, number))

    def forget(self, group: int) -> None:
        """Remove a group whose reservation was returned."""
        self._states = {bundle: state for bundle, state in self._states.items() if bundle.group != group}

    def take(self) -> tuple[Bundle, str] | None:
        """Take a free bundle on the node with the fewest workers; return it and the node, or None."""
        workers = Counter(state.node for state in self._states.values() if state.use == "taken")
        best: tuple[int, Bundle, str] | None = None
        for bundle, state in self._states.items():
            if self._usable(state) and state.use == "free" and state.node is not None:
                candidate = (workers[state.node], bundle, state.node)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        self._use(best[1], "taken")
        return best[1], best[2]

    def rest(self, bundle: Bundle) -> None:
        """Mark a bundle whose worker has ended."""
        self._use(bundle, "resting")

    def free(self, bundle: Bundle) -> None:
        """Make a bundle available."""
        self._use(bundle, "free")

    def resting_at(self, bundle: Bundle) -> str | None:
        """Return the node of a resting bundle, or None if it does not rest."""
        state = self._states.get(bundle)
        return state.node if state is not None and state.use == "resting" else None

    def nodes(self) -> list[str]:
        """Return the nodes with bundles."""
        return sorted({state.node for state in self._states.values() if state.node is not None})

    def to_come(self) -> int:
        """Return the number of bundles that are free, or will be soon."""
        long_ago = time.monotonic() - _REST_S
        return sum(
            self._usable(s) and (s.use == "free" or (s.use == "resting" and s.since > long_ago))
            for s in self._states.values()
        )

    def idle(self, seconds: float) -> list[int]:
        """Return the groups, except the first, whose bundles have been unused for ``seconds``."""
        now = time.monotonic()
        busy = {bundle.group for bundle, s in self._states.items() if s.use != "free" or now - s.since < seconds}
        return sorted({bundle.group for bundle in self._states} - busy - {0})

    def _usable(self, state: _State) -> bool:
        return state.node not in self.avoided_nodes

    def _use(self, bundle: Bundle, use: str) -> None:
        if bundle in self._states:
            self._states[bundle].use, self._states[bundle].since = use, time.monotonic()
