"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from planaria.config import OptimConfig

NONE: Mapping[nn.Parameter, float] = MappingProxyType({})
_EPS = 1e-6
"""that torch's clipping adds to a norm"""
_LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")


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


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimConfig, scales: Mapping[nn.Parameter, float] = NONE
) -> torch.optim.AdamW:
    """A fresh AdamW (zero moments); its learning rate is set before every update.

    Parameters whose ``scales`` are their own are a group for each, with its ``scale``; all others are the first group.
    """
    own: dict[float | None, list[nn.Parameter]] = {None: []}
    for parameter in parameters:
        own.setdefault(scales.get(parameter), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group, "scale": scale} for scale, group in own.items()],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def clip_gradients(named: Mapping[str, nn.Parameter], config: OptimConfig) -> tuple[float, float]:
    """Bound the gradients of a stage's parameters (or a whole model's) in place; their L2 norm before and after that.

    By layer, each decoder layer is bounded by itself, and so is each parameter outside of layers (embedding, norm,
    head). No cut divides these, so none changes what is clipped. Gradients within their bound are left as they are.
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        layer = _LAYER.match(name)
        own = "" if config.clip_by == "stage" else layer[0] if layer else name
        groups.setdefault(own, []).append(parameter)
    if not groups:
        return 0.0, 0.0
    bound = config.clip or math.inf
    each = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups.values()]
    norm = torch.stack([norm.to(each[0].device) for norm in each])
    excess = (bound / (norm + _EPS) < 1).tolist()  # as torch computes by what to multiply
    for group, length, beyond in zip(groups.values(), each, excess, strict=True):
        if beyond:
            nn.utils.clip_grads_with_norm_(group, bound, length)
    norms = norm.tolist()
    return math.hypot(*norms), math.hypot(*(min(norm, bound) for norm in norms))
