"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from planaria.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of update ``step`` (from 0) of ``steps``: linear warm-up, then constant or cosine decay."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup) / max(1, steps - config.warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(parameters: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """A fresh AdamW (zero moments); its learning rate is set before every update."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
