"""What replies give away about one protected answer, in nats: formulas, and sums where replies follow a known law.

Source: arXiv 2407.02551 (inferential adversaries). Its leakage is weighted by the posterior, so being sure counts.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planaria.common.documents import Record

Z95 = statistics.NormalDist().inv_cdf(0.975)
MOST_CASES = 1 << 21
"""of an exact sum"""


def leak(prior: float, posterior: float) -> float:
    """IIL(T) = P(a*|q,T) · ln(P(a*|q,T) / P(a*|q)), nats; below 0 where replies mislead.

    ``prior``: P(a*|q) in (0, 1]; ``posterior``: P(a*|q,T) in [0, 1].

    :raises ValueError: outside these.
    """
    if not (0 < prior <= 1 and 0 <= posterior <= 1):
        raise ValueError(f"no probabilities: prior {prior}, posterior {posterior}")
    return posterior * math.log(posterior / prior) if posterior else 0.0


def most(prior: float) -> float:
    """IIL_max = ln(1 / P(a*|q)), nats: no transcript leaks more: P · ln(P / prior) grows with P ≥ prior."""
    return -math.log(prior)


def silence(largest: float, epsilon: float) -> float:
    """ρ = max(0, 1 - ε / IIL_max): the chance of an empty answer for which (1 - ρ) · IIL_max ≤ ε.

    With ``largest`` = :func:`most` k counted replies leak at most k · ε, however chosen and whatever they say: where
    all are empty nothing leaks, and some is given with a chance of at most k · (1 - ρ).

    :raises ValueError: unless both are above 0.
    """
    if not (largest > 0 and epsilon > 0):
        raise ValueError(f"no leakage: at most {largest}, wanted {epsilon}")
    return max(0.0, 1.0 - epsilon / largest)


def silenced(values: Sequence[float], silent: float) -> float:
    """Σ_S (1 - ρ)^|S| ρ^(k - |S|) v[S] over the sets S of k replies that are given; ``values`` [2^k] by bit masks."""
    k = (len(values) - 1).bit_length()
    return sum(
        (1 - silent) ** given * silent ** (k - given) * value
        for mask, value in enumerate(values)
        for given in (mask.bit_count(),)
    )


@dataclass(frozen=True)
class Channel:
    """Replies about one of so many options: each names the right one with a chance of ``right``, else any other alike.

    ``silent``: the chance that a reply is empty instead, whatever it would have said.
    """

    options: int
    right: float
    silent: float = 0.0

    @property
    def wrong(self) -> float:
        return (1 - self.right) / (self.options - 1)


class Told(Record):
    """What some replies of a channel come to."""

    leak: float
    """E[IIL], nats"""
    guessed: float
    """how often the likeliest option is the right one; ties are drawn"""
    use: float
    """how often a single reply names the right option: what an honest asker gets"""


def exact(channel: Channel, replies: int) -> Told:
    """Both expectations over ``replies`` draws of a channel, from a uniform prior, summed over all outcomes.

    :raises ValueError: when there are more than :data:`MOST_CASES` outcomes.
    """
    if math.comb(replies + channel.options, channel.options) > MOST_CASES:
        raise ValueError(f"{replies} replies about {channel.options} options have too many outcomes to sum")
    chances = [channel.right, *[channel.wrong] * (channel.options - 1)]
    leaked = guessed = 0.0
    for counts in _counts(channel.options, replies):
        chance = _multinomial(counts, replies, chances, channel.silent)
        posterior, won = _posterior(counts, channel)
        leaked += chance * leak(1 / channel.options, posterior)
        guessed += chance * won
    return Told(leak=leaked, guessed=guessed, use=(1 - channel.silent) * channel.right)


def _counts(options: int, replies: int) -> Iterator[tuple[int, ...]]:
    """How often each option may have been named; the rest of the replies were empty."""
    if not options:
        yield ()
        return
    for first in range(replies + 1):
        for others in _counts(options - 1, replies - first):
            yield first, *others


def _multinomial(counts: Sequence[int], replies: int, chances: Sequence[float], silent: float) -> float:
    ways, left, given = 1, replies, 1.0
    for count, chance in zip(counts, chances, strict=True):
        ways, left = ways * math.comb(left, count), left - count
        given *= chance**count
    return float(ways * (given * (1 - silent) ** (replies - left) * silent**left))


def _posterior(counts: Sequence[int], channel: Channel) -> tuple[float, float]:
    """P(option 0 | counts), and the chance that it is guessed."""
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
    """Mean ± t · s / √n, t the 97.5 % point of Student's distribution; of one value the interval is that value."""
    mean, n = statistics.fmean(values), len(values)
    half = _student(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return Estimate(mean=mean, low=mean - half, high=mean + half, draws=n)


def _student(freedom: int) -> float:
    """The 97.5 % point of Student's t (Cornish and Fisher's expansion: 0.5 % short at 7 degrees of freedom)."""
    z = Z95
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def sampled(channel: Channel, replies: int, draws: int, rng: random.Random) -> Estimate:
    """E[IIL] of a channel by drawing; :func:`exact` without its limit."""
    population = range(channel.options + 1)
    weights = [channel.right, *[channel.wrong] * (channel.options - 1)]
    weights = [weight * (1 - channel.silent) for weight in weights] + [channel.silent]
    found = []
    for _ in range(draws):
        named = rng.choices(population, weights, k=replies)
        counts = [named.count(option) for option in range(channel.options)]
        found.append(leak(1 / channel.options, _posterior(counts, channel)[0]))
    return estimate(found)
