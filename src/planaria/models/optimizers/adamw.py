"""AdamW (arXiv 1711.05101), by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from planaria.config.schema import OptimConfig
from planaria.models.optimizers.base import NONE, Optimizer, Parameters, Scales, StageOptimizer, groups

FIRST, SECOND = KEYS = ("exp_avg", "exp_avg_sq")
"""torch's names of the first and second moment"""


class AdamW(Optimizer):
    """m ← β₁m + (1 − β₁)g and v ← β₂v + (1 − β₂)g²; w ← w − η (m̂ / (√v̂ + ε) + λw), m̂ = m / (1 − β₁^t), v̂ alike."""

    keys = KEYS

    def build(self, named: Parameters, stage: int, config: OptimConfig, scales: Scales = NONE) -> StageOptimizer:
        return adamw(named.values(), config, scales)

    def decays(self, config: OptimConfig) -> dict[str, float]:
        return {FIRST: config.beta1, SECOND: config.beta2}


def adamw(parameters: Iterable[nn.Parameter], config: OptimConfig, scales: Scales = NONE) -> torch.optim.AdamW:
    """Return a fresh AdamW (zero moments); its learning rate is set before every update."""
    return torch.optim.AdamW(
        groups(parameters, scales),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
