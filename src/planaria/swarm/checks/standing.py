"""Standing: ids cost nothing, so strangers count as peers one at a time, and until then all of them together as one.

Without it, four hundred made-up peers send a hundred times what four honest ones do: they set what a group's mean is,
and though each has a small part of the gradient, together they have nearly all of it. What an id cannot be made with is
time: every ``window`` rounds the one of the strangers that was heard most often becomes known, and no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from planaria.swarm.draws import derived
from planaria.swarm.records.lines import NEWCOMERS


class Standing:
    """Whom a peer knows. Peers that hear the same know the same."""

    def __init__(self, founders: Collection[str], size: int, window: int, seed: int) -> None:
        """``founders``: ids known from the start; unless given, ``size`` of those who are heard first."""
        self._known, self._size, self._window, self._seed = {*founders}, size, window, seed
        self._heard: Counter[str] = Counter()
        self._next = 0

    def hear(self, number: int, heard: Collection[str]) -> Mapping[str, str]:
        """Take note of who sent something for round ``number``: peer → the account that it is counted under."""
        if not self._known:
            self._known = {*self.drawn(number, heard)[: self._size]}
        strangers = self.drawn(number, {*heard} - self._known)
        accounts = {peer: peer for peer in heard} | dict.fromkeys(strangers, NEWCOMERS)
        self._heard.update(strangers)
        patient = [peer for peer in strangers if self._heard[peer] >= self._window]
        if patient and number >= self._next:
            first = max(patient, key=lambda peer: self._heard[peer])
            self._known.add(first)
            del self._heard[first]
            self._next = number + self._window
        return accounts

    def drawn(self, number: int, peers: Collection[str]) -> list[str]:
        """Them in an order that is drawn anew in every round, the same for all peers."""
        return sorted(peers, key=lambda peer: derived(self._seed, "standing", number, peer))

    def memory(self) -> tuple[list[str], dict[str, int], int]:
        """Who is known, in how many rounds every stranger was heard, and when the next may become known."""
        return sorted(self._known), dict(self._heard), self._next

    def recall(self, known: Collection[str], heard: Mapping[str, int], until: int) -> None:
        """Become what gave this memory."""
        self._known, self._heard, self._next = {*known}, Counter(heard), until
