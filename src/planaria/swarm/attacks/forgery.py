"""Forged claims: log-probabilities that make a completion, or one part of it, count as much as the loss lets it.

The attacker takes its victims to hold the weights that it holds, and knows their loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from planaria.swarm.learning.loss_config import LossConfig
from planaria.swarm.policy.reading import Floats

MARGIN = 0.1
"""nats by which a ratio lies on the side of a bound that counts"""


def of_row(loss: LossConfig, logps: Floats, rewarded: bool) -> Floats:
    """Claims [T] in nats that give each token the largest gradient, for a policy that gives them ``logps``.

    A truncated weight is at its cap from there on. A ratio to the generator earns nothing beyond its clip, or if it is
    a failure's beyond the cap, so it stays below. The other losses look at claims only to tell near from far.
    """
    if loss.term != "vis":
        return logps - math.log(loss.cap) - MARGIN
    return logps - math.log(1 + loss.high if rewarded else loss.cap) + MARGIN


def of_tokens(loss: LossConfig, logps: Floats, rewarded: bool, places: Sequence[int]) -> Floats:
    """The same for the tokens at ``places``; the others are claimed to have been certain, so they count least."""
    claims = np.zeros_like(logps)
    chosen = list(places)
    claims[chosen] = of_row(loss, logps, rewarded)[chosen]
    return claims


def changed(ids: Sequence[int], source: Sequence[int]) -> list[int]:
    """The places of ``ids`` that are not in ``source``."""
    blocks = SequenceMatcher(None, list(source), list(ids), autojunk=False).get_matching_blocks()
    kept = {place for block in blocks for place in range(block.b, block.b + block.size)}
    return [place for place in range(len(ids)) if place not in kept]
