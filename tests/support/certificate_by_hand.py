"""The certificate from its definition in plain Python, independent of the implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[Sequence[float]]]


def loss(texts: Sequence[Sequence[float]], w: Sequence[float]) -> float:
    """Return f_d(w): the mean over texts of -ln Σ_j w_j exp(ln p_j), with the largest term factored out."""
    found = []
    for text in texts:
        top = max(text)
        found.append(-top - math.log(math.fsum(a * math.exp(p - top) for a, p in zip(w, text, strict=True))))
    return math.fsum(found) / len(found)


def value(domains: Rows, w: Sequence[float]) -> float:
    return max(loss(texts, w) for texts in domains)


def lower(domains: Rows, w: Sequence[float], q: Sequence[float], floor: float) -> float:
    """Return Σ q f(w) less ln max over w' ≥ floor of Σ_j w'_j D_j: Jensen's bound at w itself."""
    share = [0.0] * len(w)
    for texts, price in zip(domains, q, strict=True):
        for text in texts:
            top = max(text)
            parts = [math.exp(p - top) for p in text]
            mixed = math.fsum(a * p for a, p in zip(w, parts, strict=True))
            share = [s + price / len(texts) * p / mixed for s, p in zip(share, parts, strict=True)]
    most = floor * math.fsum(share) + (1 - len(w) * floor) * max(share)
    return math.fsum(p * loss(texts, w) for p, texts in zip(q, domains, strict=True)) - math.log(most)


def stepped(domains: Rows, w: Sequence[float], q: Sequence[float], floor: float) -> list[float]:
    """Take one step of expectation maximisation of Σ q f for w = floor + (1 - K floor) v, a step in v."""
    rest = 1 - len(w) * floor
    v, new = [(a - floor) / rest for a in w], [0.0] * len(w)
    for texts, price in zip(domains, q, strict=True):
        for text in texts:
            parts = [math.exp(p - max(text)) for p in text]
            mixed = math.fsum(a * p for a, p in zip(w, parts, strict=True))
            own = [rest * p + floor * math.fsum(parts) for p in parts]
            new = [n + price / len(texts) * a * p / mixed for n, a, p in zip(new, v, own, strict=True)]
    return [floor + rest * a for a in new]


def gap(domains: Rows, w: Sequence[float], q: Sequence[float], floor: float, rounds: int) -> float:
    """Return the value less the best bound of w and of ``rounds`` - 1 steps from 0.9 w + 0.1 uniform."""
    best, size = lower(domains, w, q, floor), len(w)
    at = [floor + (1 - size * floor) * (0.9 * (a - floor) / (1 - size * floor) + 0.1 / size) for a in w]
    for _ in range(rounds - 1):
        best, at = max(best, lower(domains, at, q, floor)), stepped(domains, at, q, floor)
    return value(domains, w) - best
