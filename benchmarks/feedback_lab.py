"""Gradient descent whose replicas compress what they send, on small problems of known formulas, in float64.

The feedback is planaria's own. The compressors are ideal ones, which send float64: what is left is what feedback does.
All replicas' vectors lie in one matrix [n, d].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planaria.exchange.base import Outer
from planaria.exchange.compress.feedback import Feedback

Compress = Callable[[Tensor], Tensor]
"""[n, d] → [n, d], row by row"""
Gradients = Callable[[Tensor], Tensor]
"""x [d] → each replica's gradient there [n, d]"""


def top(k: int) -> Compress:
    """Of each row the k numbers of largest size."""

    def compress(rows: Tensor) -> Tensor:
        places = rows.abs().topk(k, dim=1).indices
        return torch.zeros_like(rows).scatter_(1, places, rows.gather(1, places))

    return compress


def grid(step: float) -> Compress:
    """Rounded to whole steps: not homogeneous."""
    return lambda rows: (rows / step).round() * step


@dataclass
class Replicas:
    """What all replicas keep, and what they step along."""

    feedback: Feedback
    compress: Compress
    delta: float
    weights: Tensor | None = None
    """[n], of EF21-W: replica i compresses g_i/(n w_i), and counts n w_i; equal unless given"""
    outer: Outer | None = field(default=None)

    def agree(self, gradients: Tensor) -> Tensor:
        """What all step along once each has its row of ``gradients``."""
        factor = 1.0 if self.weights is None else (len(gradients) * self.weights).unsqueeze(1)
        exact = {"x": gradients / factor}
        if self.outer is None and self.feedback.estimates:
            joined = {"x": (factor * exact["x"]).mean(0)}
            self.outer = Outer({**self.feedback.begun(exact), **self.feedback.shared(joined)})
            return joined["x"]
        outer = self.outer or Outer()
        meant = self.feedback.meant(outer, exact, self.delta)
        sent = {"x": self.compress(meant["x"])}
        reached, shared = self.feedback.reached(outer, {"x": (factor * sent["x"]).mean(0)})
        self.outer = Outer({**self.feedback.kept(outer, exact, meant, sent), **shared})
        return reached["x"]


def descend(replicas: Replicas, gradients: Gradients, x: Tensor, gamma: float, steps: int) -> Tensor:
    """x after so many steps x ← x − γ·(what all agree on)."""
    for _ in range(steps):
        x = x - gamma * replicas.agree(gradients(x))
    return x


def iterations(replicas: Replicas, gradients: Gradients, x: Tensor, gamma: float, most: int = 100_000) -> float:
    """Steps until the mean gradient has a thousandth of its first norm; inf if that takes more than ``most``."""
    first = float(gradients(x).mean(0).norm())
    for step in range(most):
        each = gradients(x)
        if float(each.mean(0).norm()) <= 1e-3 * first:
            return step
        x = x - gamma * replicas.agree(each)
    return math.inf


# ---- problems


def rotations() -> Tensor:
    """Hessians [3, 3, 3] of f_i = (a_iᵀx)² + ‖x‖²/4, a_i the rotations of (−3, 2, 2)."""
    rows = torch.tensor([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]], dtype=torch.float64)
    return 2 * rows.unsqueeze(2) * rows.unsqueeze(1) + torch.eye(3, dtype=torch.float64) / 2


def quadratics(seed: int, n: int, d: int, spread: float) -> tuple[list[float], Gradients]:
    """f_i = (L_i/2)‖x − b_i‖², the logarithms of the L_i normal of this ``spread``: the L_i, and gradients."""
    generator = torch.Generator().manual_seed(seed)
    smooth = (spread * torch.randn(n, generator=generator, dtype=torch.float64)).exp()
    centres = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return smooth.tolist(), lambda x: smooth.unsqueeze(1) * (x - centres)


def logistic(seed: int, n: int, d: int, samples: int, spread: float) -> tuple[float, list[float], Gradients]:
    """f_i = mean log(1 + e^{−b aᵀx}) + 0.1 Σ x²/(1 + x²), rows scaled log-normally: L, the L_i, and gradients."""
    generator = torch.Generator().manual_seed(seed)
    scale = (spread * torch.randn(n, 1, 1, generator=generator, dtype=torch.float64)).exp()
    a = torch.randn(n, samples, d, generator=generator, dtype=torch.float64) * scale / math.sqrt(d)
    b = torch.randn(n, samples, generator=generator, dtype=torch.float64).sign()
    squares = a.transpose(1, 2) @ a / (4 * samples)
    whole, *own = (float(torch.linalg.matrix_norm(h, 2)) + 0.2 for h in (squares.mean(0), *squares))

    def gradients(x: Tensor) -> Tensor:
        pull = (b * torch.sigmoid(-b * (a @ x))).unsqueeze(2) * a
        return 0.2 * x / (1 + x * x) ** 2 - pull.mean(1)

    return whole, own, gradients


def least_squares(seed: int, n: int, d: int, zeta: float, sigma: float) -> tuple[Tensor, Gradients]:
    """f_i = ‖A_i x‖²/2m + ζ u_iᵀx with Σu_i = 0 and mean ‖u_i‖² = 1, so that x* = 0 and f* = 0; gradients have noise of
    norm σ. The Hessian of f, and gradients."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 2 * d, d, generator=generator, dtype=torch.float64)
    hessians = rows.transpose(1, 2) @ rows / (2 * d)
    pulls = torch.randn(n, d, generator=generator, dtype=torch.float64)
    pulls -= pulls.mean(0)
    pulls *= zeta / pulls.square().sum(1).mean().sqrt()

    def gradients(x: Tensor) -> Tensor:
        noise = torch.randn(n, d, generator=generator, dtype=torch.float64) * (sigma / math.sqrt(d)) if sigma else 0.0
        return hessians @ x + pulls + noise

    return hessians.mean(0), gradients
