"""Whom a round waits for, by how often they let the others wait before. Pure, and the same for all who heard the same.

A peer that withholds its message costs everybody the time-out. Were it waited for again as soon as it is heard, it
could do so in every other round. So each time it must first be heard in four times as many rounds in a row: in R
rounds it costs about log4(R) time-outs, whatever it does. A peer that is not waited for is heard if it is in time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Set
from hashlib import sha256

AT_ONCE = 8
"""strangers in a round whose messages are looked for although nobody waits for them"""
STRANGERS = ""
"""all peers together that were not there first: ids cost nothing, and each new one would be waited for once"""


class Patience:
    """What a peer remembers of the others' absences."""

    def __init__(self, founders: Set[str]) -> None:
        """``founders``: peers with an account of their own; unless given, those who are heard first."""
        self.founders = frozenset(founders)
        self._row: Counter[str] | None = None
        self._missed: Counter[str] = Counter()

    @property
    def fresh(self) -> bool:
        """It has heard nobody yet."""
        return self._row is None

    def note(self, awaited: Set[str], heard: Set[str]) -> None:
        """A round is over: who was waited for, and who was heard in it."""
        self.founders = self.founders or frozenset(heard)
        self._missed.update({self._account(peer) for peer in awaited - heard})
        row = self._row or Counter()
        self._row = Counter({peer: row[peer] + 1 for peer in heard})

    def awaited(self, members: Set[str]) -> frozenset[str]:
        """Those of the members whom the next round waits for; before the first, founders if they are known, or all."""
        row = self._row
        if row is None:
            return frozenset(members) & self.founders or frozenset(members)
        return frozenset(peer for peer in members if row[peer] >= self._needed(peer))

    def drawn(self, run: str, number: int, members: Set[str]) -> frozenset[str]:
        """Those of the members whose message of a round is looked for: the founders, those heard last, and a few of the
        others, drawn anew in each round, the same for all who know the same members. Each look costs a request, and all
        strangers together count as one peer anyway (:mod:`planaria.swarm.checks.standing`)."""
        if not self.founders:
            return frozenset(members)
        sure = frozenset(members) & (self.founders | (self._row or {}).keys())
        lots = {peer: sha256(f"{run} {number} {peer}".encode()).digest() for peer in members - sure}
        return sure | frozenset(heapq.nsmallest(AT_ONCE, lots, key=lots.__getitem__))

    def _needed(self, peer: str) -> int:
        """Rounds in a row that it must have been heard in."""
        return 1 << (2 * min(15, max(0, self._missed[self._account(peer)] - 1)))

    def _account(self, peer: str) -> str:
        return peer if peer in self.founders else STRANGERS
