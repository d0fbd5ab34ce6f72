"""Leakage of replies about one protected answer, in nats.

Source: arXiv 2407.02551 (inferential adversaries). Its leakage is weighted by the posterior, so certainty counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from planaria.common.documents import Record

Z95 = statistics.NormalDist().inv_cdf(0.975)


def leak(prior: float, posterior: float) -> float:
    """Return IIL(T) = P(a*|q,T) · ln(P(a*|q,T) / P(a*|q)), nats; negative where replies mislead.

    :param prior: P(a*|q) in (0, 1]
    :param posterior: P(a*|q,T) in [0, 1]
    :raises ValueError: outside these ranges.
    """
    if not (0 < prior <= 1 and 0 <= posterior <= 1):
        raise ValueError(f"no probabilities: prior {prior}, posterior {posterior}")
    return posterior * math.log(posterior / prior) if posterior else 0.0


def max_leakage(prior: float) -> float:
    """Return IIL_max = ln(1 / P(a*|q)), nats: an upper bound for any transcript."""
    return -math.log(prior)


def silence_probability(largest: float, epsilon: float) -> float:
    """Return ρ = max(0, 1 - ε / IIL_max), the probability of an empty reply for which (1 - ρ) · IIL_max ≤ ε.

    With ``largest`` = :func:`max_leakage`, k counted replies leak at most k · ε, however they are chosen. Empty replies
    leak nothing, and the probability that at least one of k is not empty is at most k · (1 - ρ).

    :raises ValueError: unless both are above 0.
    """
    if not (largest > 0 and epsilon > 0):
        raise ValueError(f"no leakage: at most {largest}, wanted {epsilon}")
    return max(0.0, 1.0 - epsilon / largest)


def censored_mean(values: Sequence[float], silent: float) -> float:
    """Return Σ_S (1 - ρ)^|S| ρ^(k - |S|) v[S] over the sets S of sent replies, of k; ``values`` [2^k] by bit mask."""
    k = (len(values) - 1).bit_length()
    return sum(
        (1 - silent) ** given * silent ** (k - given) * value
        for mask, value in enumerate(values)
        for given in (mask.bit_count(),)
    )


class Estimate(Record):
    """A mean of independent draws with its 95 % interval (Student's t)."""

    mean: float
    low: float
    high: float
    draws: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f} … {self.high:.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean ± t · s / √n, with t the 97.5 % point of Student's distribution; zero width for one value."""
    mean, n = statistics.fmean(values), len(values)
    half = _student_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return Estimate(mean=mean, low=mean - half, high=mean + half, draws=n)


def _student_quantile(freedom: int) -> float:
    """Return the 97.5 % point of Student's t (Cornish-Fisher expansion: 0.5 % too small at 7 degrees of freedom)."""
    z = Z95
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
