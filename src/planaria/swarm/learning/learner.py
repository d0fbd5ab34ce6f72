"""One update of a policy from one round's lessons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planaria.config import OptimConfig
from planaria.engine.optimizer import clip_gradients, learning_rate, make_optimizer
from planaria.swarm.learning.loss import divisor_of, policy_loss
from planaria.swarm.learning.loss_config import LossConfig
from planaria.swarm.learning.loss_stats import LossStats
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import Padded, pad, rows_at_once, token_logps
from planaria.swarm.rollout import Rollout

ROWS = 96
"""most completions in one microbatch"""


@dataclass(frozen=True)
class Learned:
    """What one update came to."""

    loss: float = 0.0
    grad_norm: float = 0.0
    """L2, before clipping"""
    stats: dict[str, float] = field(default_factory=dict)
    """:meth:`LossStats.means`"""


class Learner:
    """A policy with its optimizer, and a frozen copy of how it began if the loss refers to that."""

    def __init__(self, policy: Policy, loss: LossConfig, optim: OptimConfig, temperature: float, rounds: int) -> None:
        self.policy, self._loss, self._optim = policy, loss, optim
        self._temperature, self._rounds = temperature, rounds
        self.parameters = [p for p in policy.module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, optim)
        self._reference = policy.clone() if loss.beta else None

    def learn(self, number: int, taken: Sequence[Rollout]) -> Learned:
        """Update the policy once from what is learned in round ``number``; nothing happens without any."""
        if not taken:
            return Learned()
        divisor = divisor_of(self._loss, [len(rollout.ids) for rollout in taken])
        self.policy.module.zero_grad()
        total, stats = 0.0, LossStats()
        rows = rows_at_once(self.policy, max(len(rollout.prompt) + len(rollout.ids) for rollout in taken), ROWS)
        for start in range(0, len(taken), rows):
            found = self._backward(taken[start : start + rows], divisor)
            total, stats = total + found[0], stats + found[1]
        norm, _ = clip_gradients(dict(self.policy.module.named_parameters()), self._optim)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._optim, number, self._rounds)
        self.optimizer.step()
        return Learned(total, norm, stats.means())

    def _backward(self, part: Sequence[Rollout], divisor: float) -> tuple[float, LossStats]:
        device = self.parameters[0].device
        batch = pad([(rollout.prompt, rollout.ids) for rollout in part], device)
        claims = torch.full(batch.mask.shape, float("nan"), device=device)
        for row, rollout in enumerate(part):
            if rollout.logps is not None:
                claims[row][batch.mask[row]] = torch.tensor(rollout.logps, device=device)
        result = policy_loss(
            self._loss,
            token_logps(self.policy, batch, self._temperature),
            claims,
            torch.tensor([rollout.advantage for rollout in part], device=device),
            batch.mask,
            divisor=divisor,
            ref_logp=self._referred(batch),
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        return float(result.loss.detach()), result.stats

    @torch.no_grad()
    def _referred(self, batch: Padded) -> Tensor | None:
        return None if self._reference is None else token_logps(self._reference, batch, self._temperature)
