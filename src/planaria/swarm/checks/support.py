"""Support: could a peer with my weights have drawn these tokens at all?

The logit check of HTTF (arXiv 2511.09780, section on defences): accept a completion iff every token lies within the
support of the sampling strategy. It needs equal weights, and a k in proportion to the vocabulary: with a k too large,
a foreign phrase lies inside the support and its rank rises with every round that trains on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from planaria.swarm.checks.base import Check, Context, Findings
from planaria.swarm.rollout import Rollout

LARGEST, SMALL = 0.02, 6
"""a support of a larger share of the vocabulary lets phrases through, unless it is small by itself: 8 of 46 symbols
did, 3 of 46 and 6 of 257 did not"""


def outside(ranks: Sequence[int], k: int) -> int | None:
    """The place of the first token that is not among the ``k`` likeliest; None if all are."""
    return next((place for place, rank in enumerate(ranks) if rank >= k), None)


class SupportCheck(Check):
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
