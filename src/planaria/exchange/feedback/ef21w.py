"""EF21-W (Richtárik, Gasanov and Burlachenko, ICLR 2024, arXiv 2402.10774): EF21 with weights by smoothness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from planaria.config.bounds import Positive
from planaria.exchange.base import Outer, Weights
from planaria.exchange.feedback.base import full
from planaria.exchange.feedback.ef21 import EF21
from planaria.exchange.stepsize import scales

Smoothness = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LEAST = 1e-3
"""of the mean: a replica whose gradient hardly changed in the warm-up counts as one of this smoothness"""


class EF21W(EF21):
    """D = C((g − h)/s)·s, h ← h + D, h̄ ← h̄ + mean D, with the scale s_i = n·w_i = n·L_i/ΣL_j of replica i.

    In the paper's algorithm 2, h_i follows g_i/s_i and the mean counts s_i. Here h_i is s_i times that, so the other
    replicas' weights do not enter a state and a change of weights needs no conversion. The step size is ``new_rule`` of
    ``exchange/stepsize.py``.
    """

    smoothness: Annotated[list[Smoothness], Field(min_length=1)] | Literal["auto"] = "auto"
    """L_i of each replica, in order; auto: estimated in a warm-up, from how much each replica's gradient changes"""
    warmup: Positive = 8
    """steps of the warm-up, whose differences are sent in full"""

    def unfit(self, members: int) -> str:
        if self.smoothness == "auto" or len(self.smoothness) == members:
            return ""
        return f"smoothness has {len(self.smoothness)} values for exchange.replicas = {members}; give one for each"

    def measuring(self, outer: Outer) -> bool:
        return self.smoothness == "auto" and outer.measured < self.warmup

    def measure(self, outer: Outer, sent: Mapping[int, Weights]) -> Outer:
        """Add ‖Δg_i‖² of this step: L_i = √(Σ‖Δg_i‖²/Σ‖Δx‖²) over the warm-up.

        All replicas have the same parameters, so Σ‖Δx‖² cancels in the weights. All of them decode the same
        differences in the same order, and NumPy's sums do not depend on the number of threads: the weights are equal
        at all replicas to the last bit.
        """
        squares = [_square(sent[member]) for member in sorted(sent)]
        known = outer.secants if len(outer.secants) == len(squares) else (0.0,) * len(squares)
        count = outer.measured if known is outer.secants else 0
        total = tuple(one + other for one, other in zip(known, squares, strict=True))
        return replace(outer, secants=total, measured=count + 1)

    def scale(self, outer: Outer, member: int) -> float:
        if self.measuring(outer):
            return 1.0
        return scales(estimated(outer.secants) if self.smoothness == "auto" else self.smoothness)[member]


def estimated(secants: tuple[float, ...]) -> list[float]:
    """L_i up to a common factor, from Σ‖Δg_i‖²; all equal if no gradient has changed."""
    found = [math.sqrt(each) for each in secants]
    mean = sum(found) / len(found)
    return [max(each, LEAST * mean) for each in found] if mean else [1.0] * len(found)


def _square(weights: Weights) -> float:
    """‖v‖² in fp64"""
    return sum(float(np.square(full(weights[name]).cpu().numpy(), dtype=np.float64).sum()) for name in sorted(weights))
