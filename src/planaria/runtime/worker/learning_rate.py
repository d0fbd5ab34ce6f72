"""The learning-rate schedule."""

from __future__ import annotations

import math

from planaria.config.schema import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of update ``step`` (from 0) of ``steps``: linear warm-up, then constant, cosine or WSD.

    WSD (warm-up, stable, decay; arXiv 2404.06395, section 4) does not depend on ``steps`` before the decay begins, so a
    run can be extended until then.
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
