"""Whom a look at a board is for: pure decisions from who is there, who is known and who was looked at before.

Ids cost nothing, and each that is looked at costs a request. So the peers that are known have seats of their own, which
no crowd can take, whenever they come; all others share those that are left. A stranger is looked at when it is new.
Those that were looked at in vain, or have never sent a completion, are looked at again a few at a time.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Set

from planaria.swarm.board.message import Goodbye, Hello

AGAIN = 8
"""strangers without a hello that a look asks for once more"""
LEFT = 2
"""silent strangers that a look asks whether they have left: it only frees their seats"""


class Roster:
    """Who takes part, as far as it was read."""

    def __init__(self, known: Iterable[str], seats: int, secret: bytes) -> None:
        """``seats``: most peers, the known ones among them. ``secret``: what orders strangers, so that nobody can make
        an id that comes before others'."""
        self.known, self._seats, self._secret = {*known}, seats, secret
        self.hellos: dict[str, Hello] = {}
        self.goodbyes: dict[str, Goodbye] = {}
        self._heard: set[str] = set()
        self._looks = 0
        self._looked: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    def heard(self, peers: Iterable[str]) -> None:
        """These have sent completions."""
        self._heard.update(peers)

    def newcomers(self, names: Set[str]) -> list[str]:
        """Those of ``names``, of whom no hello was read yet, whose hello this look reads: the known ones, and strangers
        while there are seats, those that were looked at least often first."""
        self._looks += 1
        taken = self.hellos.keys() - self.goodbyes.keys()
        seats = max(0, self._seats - len(taken | self.known))
        drawn = heapq.nsmallest(seats, names - self.known, key=lambda peer: (self._looked[peer], self._lot(peer)))
        again = [peer for peer in drawn if self._looked[peer]][AGAIN:]
        chosen = sorted(names & self.known) + [peer for peer in drawn if peer not in {*again}]
        self._looked.update(chosen)
        return chosen

    def leavers(self) -> list[str]:
        """Those of whom no goodbye was read yet, whose goodbye this look reads: everybody whom a round may wait for,
        and a few of the silent strangers."""
        here = self.hellos.keys() - self.goodbyes.keys()
        silent = here - self.known - self._heard
        again = heapq.nsmallest(LEFT, silent, key=lambda peer: (self._asked[peer], self._lot(peer)))
        self._asked.update(again)
        return sorted(here - silent) + again

    def _lot(self, peer: str) -> bytes:
        return hashlib.sha256(self._secret + b"%d " % self._looks + peer.encode()).digest()
