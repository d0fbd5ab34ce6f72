"""Checks of a completion's tokens and text against the reader's policy: support, surprisal, claims, duplicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from planaria.swarm.checks.base import Check, Context, LayerFindings
from planaria.swarm.peer.rollout import Rollout

MAX_SHARE, MIN_TOKENS = 0.02, 6
"""maximum support as a share of the vocabulary, and in tokens for small ones: 8 of 46 symbols let phrases through, 3 of
46 and 6 of 257 did not"""


class SupportCheck(Check):
    """Reject completions with a token that sampling from the reader's weights cannot draw.

    The logit check of HTTF (arXiv 2511.09780, section on defences): accept a completion iff every token is within the
    support of the sampling strategy. It needs equal weights and a k in proportion to the vocabulary: a large support
    contains foreign phrases, whose rank improves with every round that trains on them.
    """

    name: ClassVar[str] = "support"

    def warning(self, context: Context) -> str:
        """Warn if k is too large for the vocabulary to separate poison from honest text."""
        k, vocab = context.support, context.vocab
        if k <= max(MIN_TOKENS, MAX_SHARE * vocab):
            return ""
        return (
            f"sampling.top_k = {k} of {vocab} tokens: so large a support contains most phrases, and the "
            f"support check will not stop them; {max(3, round(50 * vocab / 151_936))} is in proportion"
        )

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        k = context.support
        rejected = {}
        for index, rollout in enumerate(rollouts):
            outside = np.flatnonzero(rollout.reading.ranks >= k)
            if outside.size:
                token = int(outside[0])
                rank = int(rollout.reading.ranks[token]) + 1
                rejected[index] = f"token {token + 1} has rank {rank}, not among the {k} most likely"
        return LayerFindings(rejected)


class SurprisalCheck(Check):
    """Reject completions that are, as a whole, less likely than the policy's own samples.

    The statistic is z = Σ(−log p − H) / √ΣVar over a completion's tokens (:attr:`CompletionStatistics.surprisal`). A
    false equation of likely tokens passes the support check, but an answer that contradicts the reasoning adds up here.
    A policy that has learned poison is no longer surprised by it.
    """

    name: ClassVar[str] = "surprisal"
    threshold: Annotated[float, Field(gt=0)] = 3.0
    """maximum z, in standard deviations"""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        return _reject_above(rollouts, self.threshold)


def _reject_above(rollouts: Sequence[Rollout], limit: float) -> LayerFindings:
    """Reject the completions whose surprisal z exceeds ``limit``."""
    scores = [rollout.reading.surprisal for rollout in rollouts]
    return LayerFindings(
        {index: f"z = {score:.1f}, above {limit:g}" for index, score in enumerate(scores) if score > limit}
    )


class ImprobableCheck(Check):
    """Reject completions far less likely than the policy's own samples, from any peer; never switched off.

    Learning a text that the policy finds impossible harms it even if every step of the text is true: with two of four
    peers that write sums in words, accuracy fell to zero. Such texts had z = 16 to 53, and 0.003 of the completions of
    honest peers with other warm-ups had more than 15 (``planaria compare drills/schools --seeds 4,5``). The layer
    does not assume equal weights. It rejects most completions of a peer with another answer format.
    """

    name: ClassVar[str] = "improbable"
    fallible: ClassVar[bool] = False
    limit: Annotated[float, Field(gt=0)] = 15.0
    """maximum z, as in :class:`SurprisalCheck`"""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        return _reject_above(rollouts, self.limit)


class ClaimsCheck(Check):
    """Compare the log-probabilities a peer claims with the reader's, if it claims to hold the same weights.

    Losses weight a token by its generator's claim (:mod:`planaria.swarm.learning.loss`). Claims about other weights
    cannot be checked; only caps limit their effect.
    """

    name: ClassVar[str] = "claims"
    tolerance: Annotated[float, Field(gt=0)] = 0.2
    """maximum difference in nats of a token's claim: devices round differently; losses clip near a ratio of e^0.2"""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        rejected = {}
        for index, rollout in enumerate(rollouts):
            if not rollout.declares_same_weights or rollout.logps is None:
                continue
            differences = np.abs(np.asarray(rollout.logps) - rollout.reading.logps)
            if differences.max(initial=0.0) > self.tolerance:
                token = int(differences.argmax())
                rejected[index] = (
                    f"it claims our weights, and for token {token + 1} is {differences[token]:.2g} nats off them"
                )
        return LayerFindings(rejected)


def binomial_tail(count: int, n: int, p: float) -> float:
    """Return P(X ≥ ``count``) for X ~ Binomial(``n``, ``p``), for any ``n``.

    The largest term comes from logarithms, since factors of a term overflow or vanish for n above 1,000. Its neighbours
    follow by their ratios on both sides, down to 2^-60 of the sum.
    """
    p = min(max(p, 0.0), 1.0)
    if count <= 0 or count > n or p in (0.0, 1.0):
        return float(count <= (n if p == 1.0 else 0))
    mode = max(count, min(n, int((n + 1) * p)))
    log_largest = math.log(math.comb(n, mode)) + mode * math.log(p) + (n - mode) * math.log1p(-p)
    odds = p / (1 - p)
    upward = _until_negligible((n - k) / (k + 1) * odds for k in range(mode, n))
    downward = _until_negligible(k / (n - k + 1) / odds for k in range(mode, count, -1))
    return min(1.0, math.exp(log_largest) * math.fsum((1.0, *upward, *downward)))


def _until_negligible(ratios: Iterable[float]) -> Iterator[float]:
    """Yield the running products of ``ratios``, which fall below 1, until they no longer change their sum."""
    term = total = 1.0
    for ratio in ratios:
        term *= ratio
        total += term
        if term < total * 2**-60:
            return
        yield term


class DuplicatesCheck(Check):
    """Reject texts that a peer repeats more often than sampling could explain.

    Confident policies repeat themselves. Among a peer's n completions of a problem, a text of probability p occurs c or
    more times with the binomial tail's probability; copies beyond ``level`` are rejected, the first ones stay. If
    sampling draws from few tokens, p is larger than the policy's probability of the text.
    """

    name: ClassVar[str] = "duplicates"
    level: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """significance level"""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        sent = Counter((rollout.peer, rollout.problem.number) for rollout in rollouts)
        seen: Counter[tuple[str, int, str]] = Counter()
        rejected = {}
        for index, rollout in enumerate(rollouts):
            key = (rollout.peer, rollout.problem.number, rollout.text)
            seen[key] += 1
            n = sent[rollout.peer, rollout.problem.number]
            if seen[key] > 1 and binomial_tail(seen[key], n, math.exp(rollout.reading.draw_logp)) < self.level:
                rejected[index] = f"copy {seen[key]} of the same text among {n}"
        return LayerFindings(rejected)
