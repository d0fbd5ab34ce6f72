"""What a server did for a peer in a round, as its log has it."""

from __future__ import annotations

from planaria.common.documents import Record


class Serving(Record):
    """What a server did in one round."""

    tokens: int = 0
    """drawn, the ends among them"""
    seconds: float = 0.0
    requests: int = 0
    queue: int = 0
    """most requests that waited for their turn at once"""
    behind: int = 0
    """rounds that its weights were older than the policy's"""
    claimed: float = 0.0
    """share of its completions whose tokens' log-probabilities it told"""
    local: str = ""
    """why the policy drew in its place; empty if it did not"""
    unpushed: str = ""
    """why it did not get this round's weights; empty if it did, or had them"""

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        """In a few words, for the terminal."""
        if self.local:
            return f"none: {self.local}"
        queue = f", {self.queue} waited" if self.queue else ""
        behind = f", {self.behind} behind" if self.behind else ""
        return f"{self.speed:,.0f} tokens/s{queue}{behind}"
