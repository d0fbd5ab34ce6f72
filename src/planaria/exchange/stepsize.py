"""Theoretical step sizes for EF21's estimates: old and new rule (arXiv 2402.10774).

f = (1/n) Σ f_i, f_i is L_i-smooth, f is L-smooth. No proof covers AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def xi(delta: float) -> float:
    """Return ξ(δ) = (1 + √(1 − δ))/δ − 1, for a compressor with 0 < δ ≤ 1; 0 for a lossless one."""
    if not 0.0 < delta <= 1.0:
        raise ValueError(f"delta = {delta}: give more than 0, and at most 1")
    return (1.0 + math.sqrt(1.0 - delta)) / delta - 1.0


def arithmetic(smoothness: Sequence[float]) -> float:
    """Return L_AM = mean L_i."""
    return sum(smoothness) / len(smoothness)


def quadratic(smoothness: Sequence[float]) -> float:
    """Return L_QM = √(mean L_i²), at least the arithmetic mean."""
    return math.sqrt(sum(each * each for each in smoothness) / len(smoothness))


def old_rule(whole: float, smoothness: Sequence[float], delta: float) -> float:
    """Return γ = 1/(L + L_QM ξ), EF21's (arXiv 2106.05203, theorem 1); ``whole`` is L."""
    return 1.0 / (whole + quadratic(smoothness) * xi(delta))


def new_rule(whole: float, smoothness: Sequence[float], delta: float) -> float:
    """Return γ = 1/(L + L_AM ξ), EF21-W's, which also holds for EF21 (arXiv 2402.10774, theorem 3); ``whole`` is L."""
    return 1.0 / (whole + arithmetic(smoothness) * xi(delta))


def weights(smoothness: Sequence[float]) -> list[float]:
    """Return w_i = L_i/ΣL_j (arXiv 2402.10774, algorithm 2): replica i compresses g_i/(n w_i), which counts n w_i."""
    return [each / sum(smoothness) for each in smoothness]


def scales(smoothness: Sequence[float]) -> list[float]:
    """Return n·w_i, the divisor of replica i's vector before compression (arXiv 2402.10774, algorithm 2)."""
    return [len(smoothness) * weight for weight in weights(smoothness)]
