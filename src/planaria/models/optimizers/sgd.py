"""Stochastic gradient descent with momentum, by ``torch.optim.SGD``: one state tensor per parameter."""

from __future__ import annotations

from typing import Any

import torch

from planaria.config.schema import OptimConfig
from planaria.models.optimizers.base import NONE, Optimizer, Parameters, Scales, StageOptimizer, groups

MOMENTUM = "momentum_buffer"


class Sgd(Optimizer):
    """b ← β₁b + g + λw; w ← w − ηb, or with Nesterov's step w ← w − η(g + λw + β₁b)."""

    keys = (MOMENTUM,)
    unused = ("beta2", "eps")
    nesterov: bool = False
    """take Nesterov's step"""

    def build(self, named: Parameters, stage: int, config: OptimConfig, scales: Scales = NONE) -> StageOptimizer:
        return _CountedSgd(
            groups(named.values(), scales),
            lr=config.lr,
            momentum=config.beta1,
            weight_decay=config.weight_decay,
            nesterov=self.nesterov,
        )


class _CountedSgd(torch.optim.SGD):
    """SGD that counts updates and has a momentum from the first one on, even with β₁ = 0."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if p not in self.state:
                self.state[p] = {"step": torch.zeros((), device=p.device), MOMENTUM: torch.zeros_like(p)}
            self.state[p]["step"] += 1
        return super().step(closure)
