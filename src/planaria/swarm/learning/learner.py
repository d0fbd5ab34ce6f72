"""One update of a policy from one round's completions, with a bound on each peer's share of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from planaria.models.optimizers.adamw import adamw
from planaria.runtime.worker.clipping import clip_gradients, total_norms
from planaria.runtime.worker.learning_rate import learning_rate
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.loss import LossResult, LossStats, divisor_of, policy_loss
from planaria.swarm.learning.weight_versions import WeightVersions, trained_parameters
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import Floats, Padded, pad, rows_per_pass, token_logps

ROWS = 96
"""maximum completions of a microbatch"""


@dataclass(frozen=True)
class UpdateResult:
    """Result of one update."""

    loss: float = 0.0
    grad_norm: float = 0.0
    """L2, before clipping"""
    stats: dict[str, float] = field(default_factory=dict)
    """:meth:`LossStats.means`"""
    influence: dict[str, float] = field(default_factory=dict)
    """peer or account → its share of the gradient at the logits, after the bound"""


@dataclass(frozen=True)
class _Microbatch:
    rollouts: Sequence[Rollout]
    padded: Padded
    claims: Tensor
    """[N, T] nats; nan without a claim"""
    advantages: Tensor
    """[N]"""
    ref: Tensor | None
    """[N, T] nats under the reference policy"""


class Learner:
    """A policy with its optimizer, and a frozen copy of the initial policy if the loss uses a reference."""

    def __init__(self, config: SwarmConfig, policy: Policy) -> None:
        self.policy = policy
        self._loss, self._optim = config.loss, config.optim
        self._temperature, self._rounds = config.sampling.temperature, config.rounds.count
        self.parameters = [*trained_parameters(policy.module).values()]
        self.optimizer = adamw(self.parameters, config.optim)
        self._reference = policy.clone() if config.loss.beta else None
        self.versions = WeightVersions(policy, config.rounds.ahead)
        """the weights before this round and, with ``rounds.ahead``, before earlier ones"""

    def learn(self, round_number: int, rollouts: Sequence[Rollout], share: float = 1.0) -> UpdateResult:
        """Update the policy once from the completions of a round; do nothing without any.

        :param rollouts: completions, read by the current policy if they come from several peers
        :param share: maximum share of one peer in the gradient at the logits (:func:`peer_factors`)
        """
        if not rollouts:
            return UpdateResult()
        divisor = divisor_of(self._loss, [len(rollout.ids) for rollout in rollouts])
        self.policy.module.zero_grad()
        rows = rows_per_pass(self.policy, max(len(rollout.prompt) + len(rollout.ids) for rollout in rollouts), ROWS)
        batches = [self._make_batch(rollouts[start : start + rows]) for start in range(0, len(rollouts), rows)]
        factors, influence = self._bound_influence(batches, divisor, share)
        total, stats = 0.0, LossStats()
        for batch in batches:
            result = self._loss_result(
                batch, token_logps(self.policy, batch.padded, self._temperature), divisor, factors
            )
            result.loss.backward()  # type: ignore[no-untyped-call]
            total, stats = total + float(result.loss.detach()), stats + result.stats
        norms = clip_gradients(dict(self.policy.module.named_parameters()), self._optim)
        norm, _ = total_norms(norms, self._optim)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._optim, round_number, self._rounds)
        self.optimizer.step()
        return UpdateResult(total, norm, stats.means() | ratio_summary(rollouts, self._loss.log_ratio_bound), influence)

    def _make_batch(self, rollouts: Sequence[Rollout]) -> _Microbatch:
        device = self.parameters[0].device
        padded = pad([(rollout.prompt, rollout.ids) for rollout in rollouts], device)
        claims = _padded_logps([rollout.logps for rollout in rollouts], padded)
        advantages = torch.tensor([rollout.advantage for rollout in rollouts], device=device)
        with torch.no_grad():
            ref = None if self._reference is None else token_logps(self._reference, padded, self._temperature)
        return _Microbatch(rollouts, padded, claims, advantages, ref)

    def _bound_influence(
        self, batches: Sequence[_Microbatch], divisor: float, share: float
    ) -> tuple[Mapping[str, float], dict[str, float]]:
        """Return each peer's factor and its share of the gradient with it."""
        peers = [rollout.effective_account for batch in batches for rollout in batch.rollouts]
        if len({*peers}) == 1:
            return {}, {peers[0]: 1.0}
        results: list[float] = []
        for batch in batches:
            logp = _padded_logps([rollout.reading.logps for rollout in batch.rollouts], batch.padded).requires_grad_()
            results += logit_pulls(self._loss_result(batch, logp, divisor, {}).loss, logp).tolist()
        weights = list(zip(peers, results, strict=True))
        factors = peer_factors(weights, share)
        return factors, influence_shares(weights, factors)

    def _loss_result(
        self, batch: _Microbatch, logp: Tensor, divisor: float, factors: Mapping[str, float]
    ) -> LossResult:
        factor_of_rows = [factors.get(rollout.effective_account, 1.0) for rollout in batch.rollouts]
        return policy_loss(
            self._loss,
            logp,
            batch.claims,
            batch.advantages,
            batch.padded.mask,
            divisor=divisor,
            ref_logp=batch.ref,
            factors=torch.tensor(factor_of_rows, device=logp.device),
        )


def ratio_summary(rollouts: Sequence[Rollout], bound: float) -> dict[str, float]:
    """Return the 99th percentile and the effective sample size (a share) of the claimed tokens' ratios w = π_θ/π_gen.

    The effective sample size is (Σw)² / (n Σw²): 1 for equal weights, 1/n if one token has all weight. It falls before
    training collapses (arXiv 2602.17616). Log ratios are clamped to ± ``bound``; empty without readings or claims.
    """
    logs = [r.reading.logps - np.asarray(r.logps) for r in rollouts if r.logps is not None and len(r.reading.logps)]
    if not logs:
        return {}
    ratios = np.exp(np.concatenate(logs).clip(-bound, bound))
    ess = ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())
    return {"ess": float(ess), "ratio_p99": float(np.quantile(ratios, 0.99))}


def _padded_logps(logps: Sequence[Sequence[float] | Floats | None], padded: Padded) -> Tensor:
    """Return log-probabilities [N, T] at each row's completion; nan in padding and for rows without any."""
    result = torch.full(padded.mask.shape, float("nan"), device=padded.mask.device)
    for row, values in enumerate(logps):
        if values is not None:
            result[row][padded.mask[row]] = torch.as_tensor(values, dtype=result.dtype, device=result.device)
    return result


def peer_factors(weights: Sequence[tuple[str, float]], share: float) -> Mapping[str, float]:
    """Return peer → the factor that limits its completions to ``share`` of the sum of all weights.

    The update is a sum over completions, so a peer's share of the sum limits its effect on the update. With n peers of
    nonzero weight the bound is at least 1/n.

    The bound holds for any completions and any loss, because it is on the gradient at the logits: long completions,
    high weights and improbable tokens move a policy more than the advantage shows.

    :param weights: (peer, :func:`logit_pulls`) of every completion
    """
    mass = peer_weights(weights)
    bound = max(share, 1 / max(1, len(mass)))
    over: set[str] = set()

    def level() -> float:
        """Return the weight of a peer at the bound, given the peers that are not scaled."""
        rest = sum(value for peer, value in mass.items() if peer not in over)
        return rest * bound / (1 - len(over) * bound)

    # Scaling one peer down raises the others' shares, so peers that then exceed the bound are scaled too.
    while len(over) * bound < 1 - 1e-9:
        highest = level() * (1 + 1e-9)
        if not (result := {peer for peer, value in mass.items() if peer not in over and value > highest}):
            break
        over |= result
    # The peer with the least weight is below 1/n of the rest, so it is never scaled.
    limit = level()
    return dict.fromkeys(mass, 1.0) | {peer: limit / mass[peer] for peer in over}


def logit_pulls(loss: Tensor, logp: Tensor) -> Tensor:
    """Return the pull of each of N completions at the logits [N]: Σ over tokens of |∂loss/∂log π|·(1 − π).

    ``logp`` [N, T] is the leaf of ``loss`` with log-probabilities in nats. ∂log π/∂logits is the token's unit vector
    minus all probabilities, whose absolute values sum to 2(1 − π): the pull is half the gradient's L1 norm.
    """
    (gradient,) = torch.autograd.grad(loss, logp)
    used = logp.detach().masked_fill(gradient == 0, 0.0)  # padding may hold any value
    return (gradient.abs() * -torch.expm1(used.clamp(max=0.0))).sum(1)


def influence_shares(weights: Sequence[tuple[str, float]], factors: Mapping[str, float]) -> dict[str, float]:
    """Return peer → its share of the sum of all weights with factors; empty if the sum is zero."""
    mass = {peer: value * factors[peer] for peer, value in peer_weights(weights).items()}
    return {peer: value / sum(mass.values()) for peer, value in mass.items()}


def peer_weights(weights: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return peer → the sum of its weights, for sums above zero."""
    mass: dict[str, float] = defaultdict(float)
    for peer, weight in weights:
        mass[peer] += weight
    return {peer: value for peer, value in mass.items() if value > 0}
