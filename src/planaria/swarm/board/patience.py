"""Whom a round waits for, by how often they let the others wait before. Pure, and the same for all who heard the same.

A peer that withholds its message costs everybody the time-out. Were it waited for again as soon as it is heard, it
could do so in every other round. So each time it must first be heard in twice as many rounds in a row: in R rounds it
costs about log2(R) time-outs, whatever it does. A peer that is not waited for is heard all the same if it is in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

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
        """Those of the members whom the next round waits for; all of them before the first."""
        row = self._row
        if row is None:
            return frozenset(members)
        return frozenset(peer for peer in members if row[peer] >= self._needed(peer))

    def _needed(self, peer: str) -> int:
        """Rounds in a row that it must have been heard in."""
        return 1 << min(30, max(0, self._missed[self._account(peer)] - 1))

    def _account(self, peer: str) -> str:
        return peer if peer in self.founders else STRANGERS
