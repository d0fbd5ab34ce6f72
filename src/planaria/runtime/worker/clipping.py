"""Gradient clipping and norms."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from planaria.config.schema import OptimConfig
from planaria.models.optimizers.base import LAYER

_EPS = 1e-6
"""added to norms by torch's clipping"""


def clip_gradients(named: Mapping[str, nn.Parameter], config: OptimConfig) -> Tensor:
    """Clip the gradients of a stage or model in place; return their previous L2 norms by group.

    With ``clip_by`` "layer", each decoder layer and each parameter outside layers (embedding, norm, head) is a group,
    so that the result does not depend on the pipeline's cut. On a GPU, only :func:`total_norms` waits for the result.
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        layer = LAYER.match(name)
        group_name = "" if config.clip_by == "stage" else layer[0] if layer else name
        groups.setdefault(group_name, []).append(parameter)
    if not groups:
        return torch.zeros(1)
    bound = config.clip or math.inf
    each = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups.values()]
    norms = torch.stack([norm.to(each[0].device) for norm in each])
    # Off the GPU, skip gradients within their bound instead of multiplying them by 1.
    beyond = [True] * len(each) if norms.is_cuda else (bound / (norms + _EPS) < 1).tolist()  # same formula as torch
    for group, length, clip in zip(groups.values(), each, beyond, strict=True):
        if clip:
            nn.utils.clip_grads_with_norm_(group, bound, length)
    return norms


def total_norms(norms: Tensor, config: OptimConfig) -> tuple[float, float]:
    """Return the L2 norm of all gradients before and after :func:`clip_gradients`, from its result."""
    bound, each = config.clip or math.inf, norms.tolist()
    return math.hypot(*each), math.hypot(*(min(norm, bound) for norm in each))
