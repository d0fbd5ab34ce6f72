"""How much peers read of each other. What a run may be follows from it: rules that no message could obey are none."""

from __future__ import annotations

from dataclasses import dataclass

LAST_ROUND = 999_999


@dataclass(frozen=True)
class Limits:
    """How much a peer reads of another; the same for all peers of a run, or one refuses what another trains on."""

    message_bytes: int = 4 * 2**20
    groups: int = 256
    """of a message"""
    completions: int = 64
    """of a group"""
    characters: int = 32_768
    """of a completion"""
    tokens: int = 8192
    """of a completion"""
    peers: int = 256
    """of a board"""


LIMITS = Limits()
