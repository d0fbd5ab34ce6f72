"""A bound by design on what one peer can do to the others in one round, whatever it sends and whichever the loss.

What is bounded is the gradient itself, where it enters the model: at the logits. A completion's advantage tells little
of it: long completions, high weights and improbable tokens move a policy more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def scales(weights: Sequence[tuple[str, float]], share: float) -> Mapping[str, float]:
    """peer → the factor on its completions that leaves no peer more than ``share`` of the sum of all weights.

    ``weights``: (peer, :func:`pulls`) of every completion that is learned from. The update is a sum over completions,
    so a peer's part of that sum is the most it can turn the update by. With n peers that have any weight the bound is
    at least 1/n, else nobody could learn.
    """
    mass = masses(weights)
    bound = max(share, 1 / max(1, len(mass)))
    factors = dict.fromkeys(mass, 1.0)
    over: set[str] = set()
    # Scaling one peer down raises the others' parts, so whoever comes to lie above the bound is scaled with it.
    while len(over) * bound < 1 - 1e-9:
        rest = sum(value for peer, value in mass.items() if peer not in over)
        level = rest * bound / (1 - len(over) * bound)
        found = {peer for peer, value in mass.items() if peer not in over and value > level * (1 + 1e-9)}
        if not found:
            break
        over |= found
    if over:  # whoever has least lies below 1/n of the rest: it is never among them
        rest = sum(value for peer, value in mass.items() if peer not in over)
        level = rest * bound / (1 - len(over) * bound)
        factors |= {peer: level / mass[peer] for peer in over}
    return factors


def pulls(loss: Tensor, logp: Tensor) -> Tensor:
    """How hard each of N completions pulls at the logits [N]: Σ over tokens of |∂loss/∂log π|·(1 − π).

    ``logp`` [N, T]: a leaf of which ``loss`` is a function, log-probabilities in nats. ∂log π/∂logits is the token's
    unit vector less all probabilities, whose absolute values add up to 2(1 − π): this is half the gradient's L1 norm.
    """
    (gradient,) = torch.autograd.grad(loss, logp)
    used = logp.detach().masked_fill(gradient == 0, 0.0)  # padding may hold anything
    return (gradient.abs() * -torch.expm1(used.clamp(max=0.0))).sum(1)


def parts(weights: Sequence[tuple[str, float]], factors: Mapping[str, float]) -> dict[str, float]:
    """peer → its part of the sum of all weights, each with its peer's factor; nobody's if there is no weight."""
    mass = {peer: value * factors[peer] for peer, value in masses(weights).items()}
    return {peer: value / sum(mass.values()) for peer, value in mass.items()}


def masses(weights: Sequence[tuple[str, float]]) -> dict[str, float]:
    """peer → the sum of its weights, where there is any."""
    mass: dict[str, float] = defaultdict(float)
    for peer, weight in weights:
        mass[peer] += weight
    return {peer: value for peer, value in mass.items() if value > 0}
