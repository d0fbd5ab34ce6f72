"""Size limits of messages and of a board."""

from __future__ import annotations

from dataclasses import dataclass

LAST_ROUND = 999_999


@dataclass(frozen=True)
class MessageLimits:
    """Limits on messages read from a peer. All peers must use the same ones, or their rounds differ."""

    groups: int = 256
    """maximum number of groups in a message"""
    completions: int = 64
    """maximum number of completions in a group"""
    characters: int = 32_768
    """maximum number of characters in a completion"""
    tokens: int = 8192
    """maximum number of tokens in a completion"""
    peers: int = 256
    """maximum number of peers of a board"""


LIMITS = MessageLimits()
