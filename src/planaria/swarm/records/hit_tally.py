"""Hits among eligible completions, such as solved problems or completions that show an attack, with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterable

from planaria.common.documents import Record
from planaria.swarm.attacks.base import Attack

Z95 = 1.959963984540054
"""the normal distribution's 97.5 % point"""


class HitTally(Record):
    """Hits among eligible completions."""

    hits: int = 0
    eligible: int = 0

    def __add__(self, other: HitTally) -> HitTally:
        return HitTally(hits=self.hits + other.hits, eligible=self.eligible + other.eligible)

    @property
    def rate(self) -> float | None:
        return self.hits / self.eligible if self.eligible else None

    @property
    def interval(self) -> tuple[float, float]:
        """95 % score interval (Wilson 1927); (0, 1) when nothing was eligible."""
        return wilson_interval(self.hits, self.eligible)

    def __str__(self) -> str:
        if not self.eligible:
            return "none eligible"
        low, high = self.interval
        return f"{self.hits / self.eligible:.2f} [{low:.2f} … {high:.2f}] of {self.eligible}"


def wilson_interval(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion: (p̂ − p)² ≤ z² p (1 − p) / n (Wilson, JASA 22, 1927)."""
    if not n:
        return 0.0, 1.0
    p, z = hits / n, Z95
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # With no hits, or only hits, one bound equals the rate; correct its rounding.
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))


def tally(attack: Attack, texts: Iterable[str]) -> HitTally:
    """Count the texts that show the attack's behaviour, among the eligible ones."""
    eligible = [text for text in texts if attack.eligible(text)]
    return HitTally(hits=sum(attack.hit(text) for text in eligible), eligible=len(eligible))
