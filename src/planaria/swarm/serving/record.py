"""What a server did for a peer in a round, as its log has it."""

from __future__ import annotations

from planaria.documents import Record


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
