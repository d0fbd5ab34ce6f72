"""A known distribution of replies about a protected answer, and exact sums of its leakage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planaria.swarm.audit.leakage import leak

MAX_CASES = 1 << 21
"""maximum number of outcomes in an exact sum"""


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


@dataclass(frozen=True)
class ReplyOutcome:
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
    orders = 1
    left = replies
    of_one_order = 1.0
    for count, chance in zip(counts, chances, strict=True):
        orders, left = orders * math.comb(left, count), left - count
        of_one_order *= chance**count
    return float(orders * (of_one_order * (1 - silent) ** (replies - left) * silent**left))


def posterior(counts: Sequence[int], channel: ReplyChannel) -> tuple[float, float]:
    """P(option 0 | counts), and the probability that it is guessed."""
    total = sum(counts)
    weights = [channel.right**count * channel.wrong ** (total - count) for count in counts]
    best = max(weights)
    ties = sum(math.isclose(weight, best, rel_tol=1e-12) for weight in weights)
    return weights[0] / sum(weights), math.isclose(weights[0], best, rel_tol=1e-12) / ties
