"""Centered clipping (arXiv 2012.10333): move from the last value towards each member, by at most τ."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from planaria.config.bounds import Positive
from planaria.exchange.robust.base import GramRule

TOLERANCE = 1e-4
"""length of the last step, relative to τ"""
ROUNDS = 1000
"""maximum number of steps with ``rounds = "auto"``"""


class CenteredClipping(GramRule):
    """v ← v + (1/n) Σ (x_j − v) min(1, τ/‖x_j − v‖) (arXiv 2012.10333, section 4), ``rounds`` times.

    The last value v is part of the outer state and must be equal at all members.

    A step is gradient descent on the mean of Huber losses of ‖x_j − v‖ with threshold τ, which is convex with curvature
    at most 1. An automatic τ never rises within a round, and the loss falls with τ. So the squared step lengths have a
    finite sum, and steps fall below any tolerance.
    """

    is_iterative: ClassVar[bool] = True

    rounds: Positive | Literal["auto"] = "auto"
    """steps per round of the exchange. auto: with a fixed τ one, which bounds a Byzantine member's influence per round;
    with an automatic τ until a step is shorter than 1e-4 τ, at most 1,000"""
    tau: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """τ; auto: the median of the distances ‖x_j − v‖, the smallest of this round's steps so far"""

    def coefficients(self, gram: Tensor) -> Tensor:
        """Return the coefficients of x_j − v in the new value minus the last value v."""
        k, c = gram.numpy(), np.zeros(len(gram))
        tau = math.inf if self.tau == "auto" else self.tau
        converge = self.rounds == "auto" and self.tau == "auto"
        for _ in range(ROUNDS if converge else 1 if self.rounds == "auto" else self.rounds):
            # With y_j = x_j − v and v + Σ c_k y_k instead of v: ‖y_j − Σ c_k y_k‖² = K_jj − 2(Kc)_j + cᵀKc
            inner = k @ c
            distances = np.sqrt(np.maximum(k.diagonal() - 2 * inner + c @ inner, 0.0))
            if self.tau == "auto":
                tau = min(tau, float(np.sort(distances)[(len(distances) - 1) // 2]))
            pull = np.divide(tau, distances, out=np.ones_like(distances), where=distances > tau) / len(distances)
            step = pull - pull.sum() * c
            c += step
            if converge and math.sqrt(max(step @ k @ step, 0.0)) <= TOLERANCE * tau:
                break
        return torch.from_numpy(c)
