"""One update of a policy from one round's lessons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planaria.config.schema import OptimConfig
from planaria.runtime.engine.optimizer import clip_gradients, learning_rate, make_optimizer, total_norms
from planaria.swarm.learning.influence import parts, pulls, scales
from planaria.swarm.learning.loss import LossResult, divisor_of, policy_loss
from planaria.swarm.learning.loss_config import LossConfig
from planaria.swarm.learning.loss_stats import LossStats
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import Floats, Padded, pad, rows_at_once, token_logps
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
    influence: dict[str, float] = field(default_factory=dict)
    """peer, or account of several → its part of the gradient at the logits, after the bound"""


@dataclass(frozen=True)
class _Microbatch:
    rollouts: Sequence[Rollout]
    padded: Padded
    claims: Tensor
    """[N, T] nats; nan where there is none"""
    advantages: Tensor
    """[N]"""
    ref: Tensor | None
    """[N, T] nats, of the reference"""


class Learner:
    """A policy with its optimizer, and a frozen copy of how it began if the loss refers to that."""

    def __init__(self, policy: Policy, loss: LossConfig, optim: OptimConfig, temperature: float, rounds: int) -> None:
        self.policy, self._loss, self._optim = policy, loss, optim
        self._temperature, self._rounds = temperature, rounds
        self.parameters = [p for p in policy.module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, optim)
        self._reference = policy.clone() if loss.beta else None

    def learn(self, number: int, taken: Sequence[Rollout], share: float = 1.0) -> Learned:
        """Update the policy once from what is learned in round ``number``; nothing happens without any.

        ``taken``: each read by this policy as it is now, if they are several peers'. ``share``: most of the gradient at
        the logits that one peer may have (:mod:`planaria.swarm.learning.influence`).
        """
        if not taken:
            return Learned()
        divisor = divisor_of(self._loss, [len(rollout.ids) for rollout in taken])
        self.policy.module.zero_grad()
        rows = rows_at_once(self.policy, max(len(rollout.prompt) + len(rollout.ids) for rollout in taken), ROWS)
        batches = [self._batch(taken[start : start + rows]) for start in range(0, len(taken), rows)]
        factors, influence = self._bounded(batches, divisor, share)
        total, stats = 0.0, LossStats()
        for batch in batches:
            found = self._result(batch, token_logps(self.policy, batch.padded, self._temperature), divisor, factors)
            found.loss.backward()  # type: ignore[no-untyped-call]
            total, stats = total + float(found.loss.detach()), stats + found.stats
        norms = clip_gradients(dict(self.policy.module.named_parameters()), self._optim)
        norm, _ = total_norms(norms, self._optim)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._optim, number, self._rounds)
        self.optimizer.step()
        return Learned(total, norm, stats.means(), influence)

    def _batch(self, rollouts: Sequence[Rollout]) -> _Microbatch:
        device = self.parameters[0].device
        padded = pad([(rollout.prompt, rollout.ids) for rollout in rollouts], device)
        claims = _rows([rollout.logps for rollout in rollouts], padded)
        advantages = torch.tensor([rollout.advantage for rollout in rollouts], device=device)
        return _Microbatch(rollouts, padded, claims, advantages, self._referred(padded))

    def _bounded(
        self, batches: Sequence[_Microbatch], divisor: float, share: float
    ) -> tuple[Mapping[str, float], dict[str, float]]:
        """Each peer's factor, and its part of the gradient with it."""
        peers = [rollout.counted for batch in batches for rollout in batch.rollouts]
        if len({*peers}) == 1:
            return {}, {peers[0]: 1.0}
        found: list[float] = []
        for batch in batches:
            logp = _rows([rollout.reading.logps for rollout in batch.rollouts], batch.padded).requires_grad_()
            found += pulls(self._result(batch, logp, divisor, {}).loss, logp).tolist()
        weights = list(zip(peers, found, strict=True))
        factors = scales(weights, share)
        return factors, parts(weights, factors)

    def _result(self, batch: _Microbatch, logp: Tensor, divisor: float, factors: Mapping[str, float]) -> LossResult:
        of_rows = [factors.get(rollout.counted, 1.0) for rollout in batch.rollouts]
        return policy_loss(
            self._loss,
            logp,
            batch.claims,
            batch.advantages,
            batch.padded.mask,
            divisor=divisor,
            ref_logp=batch.ref,
            factors=torch.tensor(of_rows, device=logp.device),
        )

    @torch.no_grad()
    def _referred(self, batch: Padded) -> Tensor | None:
        return None if self._reference is None else token_logps(self._reference, batch, self._temperature)


def _rows(logps: Sequence[Sequence[float] | Floats | None], padded: Padded) -> Tensor:
    """Log-probabilities of each row's completion where its tokens are [N, T]; nan where nobody told and in padding."""
    found = torch.full(padded.mask.shape, float("nan"), device=padded.mask.device)
    for row, told in enumerate(logps):
        if told is not None:
            found[row][padded.mask[row]] = torch.as_tensor(told, dtype=found.dtype, device=found.device)
    return found
