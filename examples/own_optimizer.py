"""An optimizer of your own: Lion, whose step is the sign of an interpolated momentum (arXiv 2302.06675).

cd examples
planaria train demo --allow-code --optim.kind own_optimizer:Lion --optim.lr 3e-4 --optim.beta2 0.99
"""

from __future__ import annotations

from typing import Any

import torch

from planaria.config.schema import OptimConfig
from planaria.models.optimizers.base import NONE, Optimizer, Parameters, Scales, StageOptimizer, groups


class Lion(Optimizer):
    """c ← β₁m + (1 − β₁)g; w ← w − η(sign(c) + λw); m ← β₂m + (1 − β₂)g."""

    keys = ("mean",)
    unused = ("eps",)

    def build(self, named: Parameters, stage: int, config: OptimConfig, scales: Scales = NONE) -> StageOptimizer:
        options = {"lr": config.lr, "beta1": config.beta1, "beta2": config.beta2, "decay": config.weight_decay}
        return Signs(groups(named.values(), scales), options)


class Signs(torch.optim.Optimizer):
    """Lion's updates, whose state of each parameter has ``mean`` and ``step``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if p not in self.state:
                    self.state[p] = {"step": torch.zeros((), device=p.device), "mean": torch.zeros_like(p)}
                state = self.state[p]
                state["step"] += 1
                mean = state["mean"]
                update = torch.lerp(p.grad, mean, group["beta1"]).sign_()
                p.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"])
                mean.lerp_(p.grad, 1 - group["beta2"])
