"""The learning-rate schedule, and clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from planaria.config.schema import OptimConfig
from planaria.models.optimizers.muon import LAYER

_EPS = 1e-6
"""that torch's clipping adds to a norm"""


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of update ``step`` (from 0) of ``steps``: linear warm-up, then constant, cosine or WSD.

    Warm-up, stable, decay (arXiv 2404.06395, section 4) needs not know its end before the decay begins: a run that goes
    on with more steps is as one that had them from the start, as long as it had not come so far.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        falling = max(1, round(config.decay * steps))
        return config.lr * (1 - (1 - config.final_lr) * max(0.0, 1 - (steps - step) / falling))
    progress = (step - config.warmup) / max(1, steps - config.warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


def clip_gradients(named: Mapping[str, nn.Parameter], config: OptimConfig) -> Tensor:
    """Bound the gradients of a stage's parameters (or a whole model's) in place; their L2 norms before that, by group.

    By layer, each decoder layer is bounded by itself, and so is each parameter outside of layers (embedding, norm,
    head). No cut divides these, so none changes what is clipped. Gradients within their bound are left as they are.
    On a GPU nothing waits for the result; :func:`total_norms` does.
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        layer = LAYER.match(name)
        own = "" if config.clip_by == "stage" else layer[0] if layer else name
        groups.setdefault(own, []).append(parameter)
    if not groups:
        return torch.zeros(1)
    bound = config.clip or math.inf
    each = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups.values()]
    norms = torch.stack([norm.to(each[0].device) for norm in each])
    # Where reading a number costs nothing, gradients within their bound are not multiplied by 1.
    beyond = [True] * len(each) if norms.is_cuda else (bound / (norms + _EPS) < 1).tolist()  # as torch computes
    for group, length, clip in zip(groups.values(), each, beyond, strict=True):
        if clip:
            nn.utils.clip_grads_with_norm_(group, bound, length)
    return norms


def total_norms(norms: Tensor, config: OptimConfig) -> tuple[float, float]:
    """The L2 norm of all gradients before and after :func:`clip_gradients`, from the norms that it returned."""
    bound, each = config.clip or math.inf, norms.tolist()
    return math.hypot(*each), math.hypot(*(min(norm, bound) for norm in each))
