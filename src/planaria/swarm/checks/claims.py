"""Claims: whoever says that it holds my weights must give its tokens the log-probabilities that I give them.

Losses weigh a token by what its generator says of it (:mod:`planaria.swarm.learning.loss`). Nobody can check a claim
about other weights, and only caps bound what it does. One about equal weights is about numbers that the reader has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from planaria.swarm.checks.base import Check, Context, Findings
from planaria.swarm.rollout import Rollout


class ClaimsCheck(Check):
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
