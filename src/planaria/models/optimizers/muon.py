"""Muon (arXiv 2502.16982) for the matrices of decoder layers, AdamW for all else."""

from __future__ import annotations

import torch
from torch import nn

from planaria.config.schema import OptimConfig
from planaria.models.optimizers.adamw import FIRST, SECOND, AdamW, adamw
from planaria.models.optimizers.base import LAYER, NONE, Parameters, Scales, StageOptimizer, groups


class Muon(AdamW):
    """Muon with AdamW's state keys, so that stages can be re-cut by parameter.

    Muon's momentum is the same mean of gradients as the first moment; the second moment stays zero.
    """

    elementwise = False

    def build(self, named: Parameters, stage: int, config: OptimConfig, scales: Scales = NONE) -> StageOptimizer:
        wanted = matrices(named, stage)
        theirs = set(wanted)
        adam = adamw((p for p in named.values() if p not in theirs), config, scales)
        if not wanted:
            return adam
        muon = torch.optim.Muon(
            groups(wanted, scales),
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.beta1,
            adjust_lr_fn="match_rms_adamw",
        )
        return MuonBesideAdamW(adam, muon)


class MuonBesideAdamW:
    """Both optimizers with one ``state``."""

    def __init__(self, adam: torch.optim.AdamW, muon: torch.optim.Muon) -> None:
        self._adamw, self._muon = adam, muon
        self.state = adam.state
        self.param_groups = [*adam.param_groups, *muon.param_groups]

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self._adamw.step()
        for group in self._muon.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if p not in self.state:
                    zero = {FIRST: torch.zeros_like(p), SECOND: torch.zeros_like(p)}
                    self.state[p] = {"step": torch.zeros((), device=p.device), **zero}
                self.state[p]["step"] += 1
                self._muon.state[p] = {"momentum_buffer": self.state[p][FIRST]}
        self._muon.step()  # type: ignore[no-untyped-call]


def matrices(named: Parameters, stage: int) -> list[nn.Parameter]:
    """Return the matrices of a stage's layers, without embedding and head, whatever the cut."""
    return [p for name, p in named.items() if p.ndim == 2 and (stage > 0 or LAYER.match(name))]
