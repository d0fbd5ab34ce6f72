"""Surprisal: is this completion, taken as a whole, less likely than the policy's own ever are?

A test of the sum: z = Σ(−log p − H) / √ΣVar over a completion's tokens (:attr:`Reading.surprisal`). A false equation
made of likely tokens passes the support check; that the answer then contradicts the reasoning costs nats, and they add
up here. It is a race: once a policy has learned from poison, poison no longer surprises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from planaria.swarm.checks.base import Check, Context, Findings
from planaria.swarm.rollout import Rollout


class SurprisalCheck(Check):
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
