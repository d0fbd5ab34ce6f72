"""Weights of replicas in EF21-W (arXiv 2402.10774), from the smoothness L_i of each replica's objective.

No proof covers AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence


def weights(smoothness: Sequence[float]) -> list[float]:
    """Return w_i = L_i/ΣL_j (arXiv 2402.10774, algorithm 2): replica i compresses g_i/(n w_i), which counts n w_i."""
    return [each / sum(smoothness) for each in smoothness]


def scales(smoothness: Sequence[float]) -> list[float]:
    """Return n·w_i, the divisor of replica i's vector before compression (arXiv 2402.10774, algorithm 2)."""
    return [len(smoothness) * weight for weight in weights(smoothness)]
