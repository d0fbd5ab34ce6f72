"""Quarantine with appeal: peers of whom much is refused are set aside for a while, never for good.

One statistic that bans a peer for ever bans an honest one sooner or later. Here a peer that is set aside goes on being
examined; when its time is over and what it sent meanwhile was clean, it is back.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping


class Quarantine:
    """The record of every peer over the last ``window`` rounds."""

    name = "quarantine"

    def __init__(self, threshold: float, window: int) -> None:
        self.threshold, self.window = threshold, window
        self._past: dict[str, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=window))
        self._until: dict[str, int] = {}

    def hear(self, number: int, found: Mapping[str, tuple[int, int]]) -> dict[str, str]:
        """Take note of round ``number``: peer → (sent, refused). Who is set aside in this very round, and why."""
        if not self.threshold:
            return {}
        aside = {}
        for peer, counts in found.items():
            self._past[peer].append(counts)
            sent, refused = (sum(column) for column in zip(*self._past[peer], strict=True))
            share = refused / max(1, sent)
            if share > self.threshold and number >= self._until.get(peer, 0):
                self._until[peer] = number + self.window
            if number < self._until.get(peer, 0):
                aside[peer] = f"{share:.0%} of its last {sent} were refused; set aside until round {self._until[peer]}"
        return aside

    def memory(self) -> tuple[dict[str, list[tuple[int, int]]], dict[str, int]]:
        """The last rounds of every peer, and until when each was set aside last."""
        return {peer: list(past) for peer, past in self._past.items()}, dict(self._until)

    def recall(self, past: Mapping[str, list[tuple[int, int]]], until: Mapping[str, int]) -> None:
        """Become what gave this memory."""
        self._past.clear()
        for peer, counts in past.items():
            self._past[peer].extend(counts)
        self._until = dict(until)
