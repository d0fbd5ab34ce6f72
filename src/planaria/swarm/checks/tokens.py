"""Checks of a completion's tokens and text against the reader's own policy: support, surprisal, claims, duplicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from planaria.swarm.checks.base import Check, Context, Findings
from planaria.swarm.rollout import Rollout

LARGEST, SMALL = 0.02, 6
"""a support of a larger share of the vocabulary lets phrases through, unless it is small by itself: 8 of 46 symbols
did, 3 of 46 and 6 of 257 did not"""


def outside(ranks: Sequence[int], k: int) -> int | None:
    """The place of the first token that is not among the ``k`` likeliest; None if all are."""
    return next((place for place, rank in enumerate(ranks) if rank >= k), None)


class SupportCheck(Check):
    """Could a peer with the reader's weights have drawn these tokens at all?

    The logit check of HTTF (arXiv 2511.09780, section on defences): accept a completion iff every token lies within the
    support of the sampling strategy. It needs equal weights, and a k in proportion to the vocabulary: with a k too
    large, a foreign phrase lies inside the support, and its rank rises with every round that trains on it.
    """

    name: ClassVar[str] = "support"

    def warning(self, context: Context) -> str:
        """Why this k is too large for the vocabulary to tell poison from honest text; empty if it is not."""
        k, vocab = context.support, context.vocab
        if k <= max(SMALL, LARGEST * vocab):
            return ""
        return (
            f"sampling.top_k = {k} of {vocab} tokens: so large a support contains most phrases, and the "
            f"support check will not stop them; {max(3, round(50 * vocab / 151_936))} is in proportion"
        )

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> Findings:
        k = context.support
        refused = {}
        for place, rollout in enumerate(rollouts):
            if (token := outside(rollout.reading.ranks.tolist(), k)) is not None:
                rank = int(rollout.reading.ranks[token]) + 1
                refused[place] = f"token {token + 1} has rank {rank}, beyond the {k} likeliest that are drawn from"
        return Findings(refused)


class SurprisalCheck(Check):
    """Is this completion, as a whole, less likely than the policy's own ever are?

    A test of the sum: z = Σ(−log p − H) / √ΣVar over a completion's tokens (:attr:`Reading.surprisal`). A false
    equation of likely tokens passes the support check; an answer that contradicts the reasoning costs nats, which add
    up here. Once a policy has learned from poison, poison no longer surprises it.
    """

    name: ClassVar[str] = "surprisal"
    threshold: Annotated[float, Field(gt=0)] = 3.0
    """refuse completions that are so many standard deviations less likely than the policy's own"""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> Findings:
        scores = [rollout.reading.surprisal for rollout in rollouts]
        return Findings(
            {
                place: f"z = {score:.1f}, above {self.threshold:g}"
                for place, score in enumerate(scores)
                if score > self.threshold
            }
        )


class ClaimsCheck(Check):
    """A peer that claims to hold the reader's weights must report the log-probabilities that these give its tokens.

    Losses weigh a token by its generator's claim (:mod:`planaria.swarm.learning.loss`). A claim about other weights
    cannot be checked, and only caps bound its effect.
    """

    name: ClassVar[str] = "claims"
    tolerance: Annotated[float, Field(gt=0)] = 0.2
    """nats by which a token's claim may differ from what equal weights give: devices round differently, and a ratio of
    e^0.2 is about where losses clip"""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> Findings:
        refused = {}
        for place, rollout in enumerate(rollouts):
            if not rollout.alike or rollout.logps is None:
                continue
            apart = np.abs(np.asarray(rollout.logps) - rollout.reading.logps)
            if apart.max(initial=0.0) > self.tolerance:
                token = int(apart.argmax())
                refused[place] = f"it claims our weights, and for token {token + 1} is {apart[token]:.2g} nats off them"
        return Findings(refused)


def tail(count: int, n: int, p: float) -> float:
    """P(X ≥ ``count``) for X ~ Binomial(``n``, ``p``)."""
    p = min(max(p, 0.0), 1.0)
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(count, n + 1))


class DuplicatesCheck(Check):
    """Does a peer repeat a text more often than drawing from the policy could explain?

    An honest policy that is sure of itself repeats itself. Among n completions of one problem by one peer, a text that
    is drawn with probability p occurs c times or more with the binomial tail's probability; copies beyond what is
    plausible are refused, the first ones stay. If sampling draws from few tokens, p is larger than what the policy
    gives the text.
    """

    name: ClassVar[str] = "duplicates"
    level: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """refuse texts repeated more often than chance allows, at this level"""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> Findings:
        sent = Counter((rollout.peer, rollout.problem.number) for rollout in rollouts)
        seen: Counter[tuple[str, int, str]] = Counter()
        refused = {}
        for place, rollout in enumerate(rollouts):
            key = (rollout.peer, rollout.problem.number, rollout.text)
            seen[key] += 1
            n = sent[rollout.peer, rollout.problem.number]
            if seen[key] > 1 and tail(seen[key], n, math.exp(rollout.reading.drawn)) < self.level:
                refused[place] = f"copy {seen[key]} of the same text among {n}"
        return Findings(refused)
