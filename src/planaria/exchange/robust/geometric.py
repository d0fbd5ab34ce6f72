"""The geometric median (RFA, arXiv 1912.13445): the point with the smallest sum of distances to all members."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planaria.config.bounds import Positive
from planaria.exchange.robust.base import GramRule, squared_distances

Matrix = NDArray[np.float64]

TOLERANCE = 1e-6
"""excess of the sum of distances over its minimum, relative"""
ROUNDS = 1000
"""maximum number of steps with ``rounds = "auto"``"""
_SMALLEST = 1e-9
"""ν, in mean distances between members: the minimum distance"""


class GeometricMedian(GramRule):
    """argmin_z F(z) with F(z) = Σ ‖x_j − z‖, by Weiszfeld steps from the mean (arXiv 1912.13445, algorithm 2).

    A step is z ← Σ w_j x_j with w_j ∝ 1/max(ν, ‖x_j − z‖), and F falls in every step. Steps are slow only near a member
    that almost minimises F, where F is almost minimal too. If a member is the minimum, Kuhn's condition finds it before
    the first step.
    """

    rounds: Positive | Literal["auto"] = "auto"
    """Weiszfeld steps; auto: until F is provably within 1e-6 of its minimum, at most 1,000"""

    def coefficients(self, gram: Tensor) -> Tensor:
        k, distances = gram.numpy(), squared_distances(gram).sqrt().numpy()
        n, smallest = len(k), _SMALLEST * float(distances.mean())
        auto = self.rounds == "auto"
        w = np.full(n, 1.0 / n)
        for number in range(ROUNDS if self.rounds == "auto" else self.rounds):
            # ‖x_j − Σ w x‖² = K_jj − 2(Kw)_j + wᵀKw
            inner = k @ w
            near = np.sqrt(np.maximum(k.diagonal() - 2 * inner + w @ inner, 0.0))
            if not near.any():  # all are equal
                break
            pull = 1.0 / np.maximum(near, smallest)
            step = pull / pull.sum() - w
            slope = pull.sum() * math.sqrt(max(step @ k @ step, 0.0))  # ‖∇F(z)‖
            if auto and _is_close_enough(slope, n):
                break
            if auto and number == 0 and (median := _minimising_member(k, distances, smallest)) is not None:
                return torch.eye(n, dtype=gram.dtype)[median]
            w += step
        return torch.from_numpy(w)


def _is_close_enough(slope: float, n: int) -> bool:
    """Return whether F(z) − F* ≤ TOLERANCE · F(z) follows from the length of a subgradient at z.

    F(z) − F* ≤ slope · ‖z − z*‖ by convexity, and n‖z − z*‖ ≤ F(z) + F* ≤ 2F(z).
    """
    return 2.0 * slope / n <= TOLERANCE


def _minimising_member(gram: Matrix, distances: Matrix, smallest: float) -> int | None:
    """Return the member that minimises F, or None.

    Kuhn's condition: x_k does if the sum of unit vectors from the other members to it is no longer than the number of
    members at x_k. The excess is the length of the shortest subgradient.
    """
    same = distances <= smallest
    pull = np.where(same, 0.0, 1.0 / np.maximum(distances, smallest))
    away = np.diag(pull.sum(axis=1)) - pull
    slopes = np.sqrt(np.maximum(((away @ gram) * away).sum(axis=1), 0.0)) - same.sum(axis=1)
    best = int(slopes.argmin())
    return best if _is_close_enough(float(slopes[best]), len(gram)) else None
