"""Duplicates: does a peer repeat a text more often than drawing from the policy could explain?

A policy that is sure of itself repeats itself, and honestly so. Among n completions of one problem by one peer, a text
that sampling draws with probability p occurs c times or more with the binomial tail's probability; copies beyond what
that makes plausible are refused, the first ones stay. Where sampling draws from few tokens, p is larger than what the
policy gives the text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from planaria.swarm.checks.base import Check, Context, Findings
from planaria.swarm.rollout import Rollout


def tail(count: int, n: int, p: float) -> float:
    """P(X ≥ ``count``) for X ~ Binomial(``n``, ``p``)."""
    p = min(max(p, 0.0), 1.0)
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(count, n + 1))


class DuplicatesCheck(Check):
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
