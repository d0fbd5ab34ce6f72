"""Leakage of replies about one protected answer, in nats: formulas, and exact sums for a known reply distribution.

Source: arXiv 2407.02551 (inferential adversaries). Its leakage is weighted by the posterior, so certainty counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planaria.common.documents import Record

Z95 = statistics.NormalDist().inv_cdf(0.975)
MAX_CASES = 1 << 21
"""maximum number of outcomes in an exact sum"""


def leak(prior: float, posterior: float) -> float:
    """IIL(T) = P(a*|q,T) · ln(P(a*|q,T) / P(a*|q)), nats; negative where replies mislead.

    ``prior``: P(a*|q) in (0, 1]; ``posterior``: P(a*|q,T) in [0, 1].

    :raises ValueError: outside these ranges.
    """
    if not (0 < prior <= 1 and 0 <= posterior <= 1):
        raise ValueError(f"no probabilities: prior {prior}, posterior {posterior}")
    return posterior * math.log(posterior / prior) if posterior else 0.0


def most(prior: float) -> float:
    """IIL_max = ln(1 / P(a*|q)), nats: the bound of any transcript, as P · ln(P / prior) grows with P ≥ prior."""
    return -math.log(prior)


def silence(largest: float, epsilon: float) -> float:
    """ρ = max(0, 1 - ε / IIL_max): the probability of an empty answer for which (1 - ρ) · IIL_max ≤ ε.

    With ``largest`` = :func:`most`, k counted replies leak at most k · ε, however they are chosen: empty replies leak
    nothing, and at least one is given with a probability of at most k · (1 - ρ).

    :raises ValueError: unless both are above 0.
    """
    if not (largest > 0 and epsilon > 0):
        raise ValueError(f"no leakage: at most {largest}, wanted {epsilon}")
    return max(0.0, 1.0 - epsilon / largest)


def silenced(values: Sequence[float], silent: float) -> float:
    """Σ_S (1 - ρ)^|S| ρ^(k - |S|) v[S] over the sets S of given replies, of k; ``values`` [2^k] by bit mask."""
    k = (len(values) - 1).bit_length()
    return sum(
        (1 - silent) ** given * silent ** (k - given) * value
        for mask, value in enumerate(values)
        for given in (mask.bit_count(),)
    )


@dataclass(frozen=True)
class ReplyChannel:
    """Distribution of replies about ``options`` options: the right one with probability ``right``, others uniformly.

    ``silent``: probability of an empty reply, independent of its content.
    """

    options: int
    right: float
    silent: float = 0.0

    @property
    def wrong(self) -> float:
        return (1 - self.right) / (self.options - 1)


class ReplyOutcome(Record):
    """Expected results of a number of replies."""

    leak: float
    """E[IIL], nats"""
    guessed: float
    """probability that the most likely option is the right one; ties are broken at random"""
    use: float
    """probability that a single reply names the right option, the utility for an honest user"""


def exact(channel: ReplyChannel, replies: int) -> ReplyOutcome:
    """Sum both expectations over all outcomes of ``replies`` draws, from a uniform prior.

    :raises ValueError: if there are more than :data:`MAX_CASES` outcomes.
    """
    if math.comb(replies + channel.options, channel.options) > MAX_CASES:
        raise ValueError(f"{replies} replies about {channel.options} options have too many outcomes to sum")
    chances = [channel.right, *[channel.wrong] * (channel.options - 1)]
    leaked = guessed = 0.0
    for counts in _counts(channel.options, replies):
        chance = _multinomial(counts, replies, chances, channel.silent)
        chance_right, won = posterior(counts, channel)
        leaked += chance * leak(1 / channel.options, chance_right)
        guessed += chance * won
    return ReplyOutcome(leak=leaked, guessed=guessed, use=(1 - channel.silent) * channel.right)


def _counts(options: int, replies: int) -> Iterator[tuple[int, ...]]:
    """Yield all possible counts per option; the remaining replies are empty."""
    if not options:
        yield ()
        return
    for first in range(replies + 1):
        for others in _counts(options - 1, replies - first):
            yield first, *others


def _multinomial(counts: Sequence[int], replies: int, chances: Sequence[float], silent: float) -> float:
    orders, left, given = 1, replies, 1.0
    for count, chance in zip(counts, chances, strict=True):
        orders, left = orders * math.comb(left, count), left - count
        given *= chance**count
    return float(orders * (given * (1 - silent) ** (replies - left) * silent**left))


def posterior(counts: Sequence[int], channel: ReplyChannel) -> tuple[float, float]:
    """P(option 0 | counts), and the probability that it is guessed."""
    total = sum(counts)
    weights = [channel.right**count * channel.wrong ** (total - count) for count in counts]
    best = max(weights)
    ties = sum(math.isclose(weight, best, rel_tol=1e-12) for weight in weights)
    return weights[0] / sum(weights), math.isclose(weights[0], best, rel_tol=1e-12) / ties


class Estimate(Record):
    """A mean of independent draws with its 95 % interval (Student's t)."""

    mean: float
    low: float
    high: float
    draws: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f} … {self.high:.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean ± t · s / √n, t the 97.5 % point of Student's distribution; zero width for one value."""
    mean, n = statistics.fmean(values), len(values)
    half = _student(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return Estimate(mean=mean, low=mean - half, high=mean + half, draws=n)


def _student(freedom: int) -> float:
    """97.5 % point of Student's t (Cornish-Fisher expansion: 0.5 % too small at 7 degrees of freedom)."""
    z = Z95
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
