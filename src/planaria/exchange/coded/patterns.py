"""Which patterns of late workers a scheme is published to bear (arXiv 2211.13802, section 2), window by window."""

from __future__ import annotations

from collections import Counter

from planaria.exchange.coded.base import History


def bursty(window: History, burst: int, most: int) -> bool:
    """(B, W, λ)-bursty, for one window of W rounds: at most λ distinct workers are late, each within B rounds."""
    first: dict[int, int] = {}
    for at, late in enumerate(window):
        for worker in late:
            if at - first.setdefault(worker, at) >= burst:
                return False
    return len(first) <= most


def arbitrary(window: History, times: int, most: int) -> bool:
    """(N, W′, λ′)-arbitrary, for one window of W′ rounds: at most λ′ workers are late, each at most N times."""
    counts = Counter(worker for late in window for worker in late)
    return len(counts) <= most and max(counts.values(), default=0) <= times


def bursty_throughout(history: History, burst: int, width: int, most: int) -> bool:
    """Whether every window of ``width`` rounds is bursty; a shorter history is one window."""
    starts = range(max(1, len(history) - width + 1))
    return all(bursty(history[start : start + width], burst, most) for start in starts)
