"""One update of a policy from one round's lessons, with a bound on each peer's part of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planaria.config.schema import OptimConfig
from planaria.models.optimizers.adamw import adamw
from planaria.runtime.engine.optimizer import clip_gradients, learning_rate, total_norms
from planaria.swarm.learning.loss import LossResult, LossStats, divisor_of, policy_loss
from planaria.swarm.learning.loss_config import LossConfig
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
        self.optimizer = adamw(self.parameters, optim)
        self._reference = policy.clone() if loss.beta else None

    def learn(self, number: int, taken: Sequence[Rollout], share: float = 1.0) -> Learned:
        """Update the policy once from what is learned in round ``number``; nothing happens without any.

        ``taken``: each read by this policy as it is now, if they are several peers'. ``share``: most of the gradient at
        the logits that one peer may have (:mod:`planaria.swarm.learning.learner`).
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


def scales(weights: Sequence[tuple[str, float]], share: float) -> Mapping[str, float]:
    """peer → the factor on its completions that leaves no peer more than ``share`` of the sum of all weights.

    ``weights``: (peer, :func:`pulls`) of every completion that is learned from. The update is a sum over completions,
    so a peer's part of that sum is the most it can turn the update by. With n peers that have any weight the bound is
    at least 1/n, else nobody could learn.

    This bounds what one peer does to the others in one round, whatever it sends and whichever the loss. The bound is on
    the gradient where it enters the model, at the logits: long completions, high weights and improbable tokens move a
    policy more than the advantage tells.
    """
    mass = masses(weights)
    bound = max(share, 1 / max(1, len(mass)))
    factors = dict.fromkeys(mass, 1.0)
    over: set[str] = set()
    # Scaling one peer down raises the others' parts, so whoever comes to lie above the bound is scaled with it.
    while len(over) * bound < 1 - 1e-9:
        rest = sum(value for peer, value in mass.items() if peer not in over)
        level = rest * bound / (1 - len(over) * bound)
        found = {peer for peer, value in mass.items() if peer not in over and value > level * (1 + 1e-9)}
        if not found:
            break
        over |= found
    if over:  # whoever has least lies below 1/n of the rest: it is never among them
        rest = sum(value for peer, value in mass.items() if peer not in over)
        level = rest * bound / (1 - len(over) * bound)
        factors |= {peer: level / mass[peer] for peer in over}
    return factors


def pulls(loss: Tensor, logp: Tensor) -> Tensor:
    """How hard each of N completions pulls at the logits [N]: Σ over tokens of |∂loss/∂log π|·(1 − π).

    ``logp`` [N, T]: a leaf of which ``loss`` is a function, log-probabilities in nats. ∂log π/∂logits is the token's
    unit vector less all probabilities, whose absolute values add up to 2(1 − π): this is half the gradient's L1 norm.
    """
    (gradient,) = torch.autograd.grad(loss, logp)
    used = logp.detach().masked_fill(gradient == 0, 0.0)  # padding may hold anything
    return (gradient.abs() * -torch.expm1(used.clamp(max=0.0))).sum(1)


def parts(weights: Sequence[tuple[str, float]], factors: Mapping[str, float]) -> dict[str, float]:
    """peer → its part of the sum of all weights, each with its peer's factor; nobody's if there is no weight."""
    mass = {peer: value * factors[peer] for peer, value in masses(weights).items()}
    return {peer: value / sum(mass.values()) for peer, value in mass.items()}


def masses(weights: Sequence[tuple[str, float]]) -> dict[str, float]:
    """peer → the sum of its weights, where there is any."""
    mass: dict[str, float] = defaultdict(float)
    for peer, weight in weights:
        mass[peer] += weight
    return {peer: value for peer, value in mass.items() if value > 0}
