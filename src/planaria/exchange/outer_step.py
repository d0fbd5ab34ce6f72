"""The outer steps: what replicas make of a round, each paper's formula in one function."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from planaria.exchange.base import Weights

Momentum = Literal["nesterov", "heavy_ball"]


def stepped(
    slow: Weights, momentum: Weights, gradient: Weights, lr: float, mu: float, kind: Momentum
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Slow weights and momentum after one outer step along ``gradient``, parameter by parameter."""
    step = nesterov if kind == "nesterov" else heavy_ball
    pairs = {name: step(slow[name], momentum[name], gradient[name], lr, mu) for name in gradient}
    return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}


def nesterov(slow: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """DiLoCo's outer step (arXiv 2311.08105, algorithm 1, with the optimizer of its section 3), elementwise:

        m ← µm + g
        φ ← φ − η(g + µm)

    with g the mean pseudo-gradient: PyTorch's ``SGD(nesterov=True)``. Returns φ and m.
    """
    momentum = mu * momentum + gradient
    return slow - lr * (gradient + mu * momentum), momentum


def heavy_ball(slow: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """The outer step of the DiLoCo that arXiv 2506.10911 compares with, elementwise:

        δ ← µδ − ηg
        φ ← φ + δ

    No look-ahead, and the learning rate lies within the momentum. Returns φ and δ.
    """
    momentum = mu * momentum - lr * gradient
    return slow + momentum, momentum


def noloco(slow: Tensor, momentum: Tensor, mean_said: Tensor, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Equations (1) and (2) of docs/noloco.md (arXiv 2506.10911), elementwise, for group G of replica i:

        δ ← αδ − (β/n) Σ_{j∈G} (φ_j − θ_j) − γ(φ − (1/n) Σ_{j∈G} φ_j)  =  αδ + ū_G − γφ
        φ ← φ + δ

    with u as :func:`planaria.exchange.noloco.said` says, ``mean_said`` its mean over the group. Returns φ and δ.
    """
    momentum = alpha * momentum + mean_said - gamma * slow
    return slow + momentum, momentum


def gasloc(
    slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """GASLoC's accelerated outer step, elementwise, for x_t = φ_t + βg_t at replica i and its mean x̄ over the group:

        φ_{t+1} = x_t − γ(x_t − x̄_t) + α(x_t − x_{t−1})

    Source: arXiv 2606.11081 as rendered in github.com/junaidaliop/zij, docs/math/gasloc.md, with αΛ there written as
    γ times the projection on differences within groups: γ = 1 averages a group. ``own`` is x_t; instead of x_{t−1} the
    state holds δ_t = x_{t−1} − φ_t, which is zero at the start. Returns φ_{t+1} and δ_{t+1}.

    Averaged over all replicas, γ drops out and this is DiLoCo with PyTorch's Nesterov momentum. Disagreement obeys
    equation (3) with the same letters. [derived here]
    """
    new = own - gamma * (own - mean) + alpha * ((own - slow) - momentum)
    return new, own - new
