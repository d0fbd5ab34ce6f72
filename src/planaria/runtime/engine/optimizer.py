"""AdamW, Muon beside it, and their learning-rate schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from planaria.config.schema import OptimConfig

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


class MuonBesideAdamW:
    """Muon (arXiv 2502.16982) for some matrices, AdamW for all else.

    ``state`` speaks of every parameter in AdamW's words (``exp_avg``, ``exp_avg_sq``, ``step``), so that a state is
    moved, kept and merged alike whichever it is of. Muon's momentum is the same mean of gradients as AdamW's first
    moment; its second moment stays zero.
    """

    def __init__(self, adamw: torch.optim.AdamW, muon: torch.optim.Muon) -> None:
        self._adamw, self._muon = adamw, muon
        self.state = adamw.state
        self.param_groups = [*adamw.param_groups, *muon.param_groups]

    def step(self) -> None:
        """One update of all parameters that have a gradient."""
        self._adamw.step()
        for group in self._muon.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if p not in self.state:
                    zero = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    self.state[p] = {"step": torch.zeros((), device=p.device), **zero}
                self.state[p]["step"] += 1
                self._muon.state[p] = {"momentum_buffer": self.state[p]["exp_avg"]}
        self._muon.step()  # type: ignore[no-untyped-call]


def matrices(named: Mapping[str, nn.Parameter], stage: int) -> list[nn.Parameter]:
    """The parameters of a stage that Muon is for: matrices of layers, not the table and head, whatever the cut."""
    return [p for name, p in named.items() if p.ndim == 2 and (stage > 0 or _LAYER.match(name))]


def stage_optimizer(
    named: Mapping[str, nn.Parameter], stage: int, config: OptimConfig, scales: Mapping[nn.Parameter, float] = NONE
) -> torch.optim.AdamW | MuonBesideAdamW:
    """What ``config`` chooses for the parameters of a stage; else as :func:`make_optimizer`."""
    wanted = matrices(named, stage) if config.kind == "muon" else []
    theirs = set(wanted)
    adamw = make_optimizer((p for p in named.values() if p not in theirs), config, scales)
    if not wanted:
        return adamw
    decay, momentum = config.weight_decay, config.beta1
    groups = _groups(wanted, scales)
    muon = torch.optim.Muon(groups, lr=config.lr, weight_decay=decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
    return MuonBesideAdamW(adamw, muon)


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimConfig, scales: Mapping[nn.Parameter, float] = NONE
) -> torch.optim.AdamW:
    """A fresh AdamW (zero moments); its learning rate is set before every update.

    Parameters whose ``scales`` are their own are a group for each, with its ``scale``; all others are the first group.
    """
    return torch.optim.AdamW(
        _groups(parameters, scales),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _groups(parameters: Iterable[nn.Parameter], scales: Mapping[nn.Parameter, float]) -> list[dict[str, Any]]:
    own: dict[float | None, list[nn.Parameter]] = {None: []}
    for parameter in parameters:
        own.setdefault(scales.get(parameter), []).append(parameter)
    return [{"params": group, "scale": scale} for scale, group in own.items()]


def clip_gradients(named: Mapping[str, nn.Parameter], config: OptimConfig) -> Tensor:
    """Bound the gradients of a stage's parameters (or a whole model's) in place; their L2 norms before that, by group.

    By layer, each decoder layer is bounded by itself, and so is each parameter outside of layers (embedding, norm,
    head). No cut divides these, so none changes what is clipped. Gradients within their bound are left as they are.
    On a GPU nothing waits for the result; :func:`total_norms` does.
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        layer = _LAYER.match(name)
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
