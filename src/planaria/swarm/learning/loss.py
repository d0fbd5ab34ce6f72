"""Losses of decentralized GRPO, selected by ``LossConfig.kind``. Advantages are computed in ``advantages.py``.

Notation: π_θ is the trained policy, π_old the policy at the start of the round's updates, π_gen the policy that sampled
a completion, as its peer claims. R = π_θ/π_old. With one update per round π_old = sg(π_θ): R is 1 and its gradient is
∇log π_θ. All probabilities are of single tokens.

| kind          | the term of one token                      | a completion's share of the loss |
|---------------|--------------------------------------------|----------------------------------|
| grpo          | min(R·Â, clip(R, 1−ε, 1+ε')·Â)             | mean of its tokens               |
| dr_grpo       | as grpo (with advantages without σ)        | sum of its tokens / a constant   |
| dapo          | as grpo, with a higher ε'                  | sum (the divisor counts tokens)  |
| nois          | R·Â                                        | as grpo                          |
| vis           | as grpo, with R = min(π_θ/π_gen, C)        | as grpo                          |
| tis           | as grpo, times sg(min(π_old/π_gen, C))     | as grpo                          |
| dis           | sg(r)·Â·log π_θ if 1−ε < r < 1+ε', else 0, with r = π_θ/π_gen | as grpo       |
| f_nois, f_vis, f_tis | as nois, vis, tis; Â = 0 where Â ≤ 0 and the divergence from π_gen is ≥ γ | as grpo |
| sequence_mask | as grpo; Â = 0 where Â < 0 and the divergence from π_gen is > δ               | as grpo |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from planaria.swarm.learning.loss_config import DivergenceKind, LossConfig


@dataclass(frozen=True)
class LossResult:
    loss: Tensor
    """a scalar with gradient"""
    stats: LossStats


def divergence(kind: DivergenceKind, logp: Tensor, gen_logp: Tensor, mask: Tensor) -> Tensor:
    """Return the distance of each completion from the policy in nats: [N, T] log-probabilities → [N], no gradient.

    With x = log π_gen − log π_θ of a token that π_gen drew, x itself (k1) and e^x − x − 1 (k3) estimate a divergence of
    π_θ from π_gen. k1_mean and k3_mean are means over the completion's tokens without padding; k3_sum is their sum. k3
    reacts to single improbable tokens (x = 7 gives 1088) and may be inf.
    Source: the estimators are J. Schulman's (Approximating KL divergence, 2020); arXiv 2605.22537 filters by k3.
    """
    x = (gen_logp - logp.detach()).masked_fill(~mask.bool(), 0.0)
    per_token = x if kind == "k1_mean" else torch.expm1(x) - x
    total = per_token.sum(1)
    return total if kind == "k3_sum" else total / mask.sum(1).clamp(min=1)


def ratio_of(logp: Tensor, other: Tensor, bound: float) -> Tensor:
    """Return π/π' from log-probabilities, clamped to e^±bound; beyond it the gradient is 0, never inf or nan."""
    return (logp - other).clamp(-bound, bound).exp()


def clipped_term(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return min(R·Â, clip(R, 1 − low, 1 + high)·Â), to be maximized. Source: arXiv 2402.03300, equation 3."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def kl_to_reference(logp: Tensor, ref_logp: Tensor, bound: float) -> Tensor:
    """Return the k3 estimate of KL(π_θ‖π_ref) of each token: e^x − x − 1 with x = log π_ref − log π_θ.

    Only x > bound is clamped. For x far below 0 all is finite, and the gradient must not vanish.
    Source: arXiv 2402.03300, equation 4.
    """
    x = (ref_logp - logp).clamp(max=bound)
    return torch.expm1(x) - x


@dataclass(frozen=True)
class LossInputs:
    """Validated inputs of the formulas; padding holds 0."""

    logp: Tensor
    """log π_θ [N, T], with gradient"""
    old: Tensor
    """log π_old [N, T]"""
    gen: Tensor
    """log π_gen [N, T]; log π_old if unknown"""
    known: Tensor
    """rows with a generator's claim: bool [N]"""
    ref: Tensor | None
    """log π_ref [N, T]"""
    advantages: Tensor
    """Â [N]"""
    mask: Tensor
    """tokens to train on: bool [N, T]"""


def keeps_advantage(config: LossConfig, batch: LossInputs) -> Tensor:
    """Return which samples keep their advantage: bool [N].

    The filter of F-TIS keeps successes and failures known to be near: Â > 0 or divergence < γ; without claims a failure
    is not known to be near. The mask of DeepSeek-V3.2 drops far failures: Â < 0 and mean x > δ, measured from π_old
    without claims. Source: arXiv 2605.22537; arXiv 2512.02556, equation 9.
    """
    if config.kind.startswith("f_"):
        kind, threshold = config.filter
        near = batch.known & (divergence(kind, batch.logp, batch.gen, batch.mask) < threshold)
        return (batch.advantages > 0) | near
    if config.kind == "sequence_mask":
        far = divergence("k1_mean", batch.logp, batch.gen, batch.mask) > config.mask_threshold
        return (batch.advantages >= 0) | ~far
    return torch.ones_like(batch.known)


def token_objectives(config: LossConfig, batch: LossInputs, advantage: Tensor) -> Tensor:
    """Return each token's objective [N, T], to be maximized, given the kept advantages [N, 1]: the table's column.

    The clip bounds a success but not a failure's ratio from above: a generator that claims a tiny probability for its
    own text would take the whole gradient. vis therefore bounds that ratio by C as well.

    dis bounds the weight of both signs: masked tokens add 0 and still count in the completion's length.

    Source: arXiv 2511.09780 (nois: the objective of decentralized GRPO), 2605.22537 (vis, tis), 2505.07291 (two-sided
    clipping), 2607.07508 (dis).
    """
    bound = config.log_ratio_bound
    ratio = _ratio(config, batch)
    if config.term == "nois":
        return ratio * advantage
    if config.term == "dis":
        return (ratio.detach() * advantage * batch.logp).masked_fill(_is_masked(config, ratio), 0.0)
    clipped = clipped_term(ratio, advantage, config.low, config.high)
    if config.term == "tis":
        return ratio_of(batch.old, batch.gen, bound).clamp(max=config.cap) * clipped
    return clipped


def _is_masked(config: LossConfig, ratio: Tensor) -> Tensor:
    """Return which tokens dis masks: those without 1 − ε < r < 1 + ε'."""
    return (ratio <= 1 - config.low) | (ratio >= 1 + config.high)


def _ratio(config: LossConfig, batch: LossInputs) -> Tensor:
    if config.term in ("vis", "dis"):
        ratio = ratio_of(batch.logp, batch.gen, config.log_ratio_bound)
        return ratio.clamp(max=config.cap) if config.term == "vis" else ratio
    return ratio_of(batch.logp, batch.old, config.log_ratio_bound)


def sample_losses(config: LossConfig, per_token: Tensor, mask: Tensor) -> Tensor:
    """Return each sample's part of the loss before the divisor: [N, T] → [N]."""
    total = (per_token * mask).sum(1)
    if config.kind == "dapo":
        return total
    if config.kind == "dr_grpo":
        assert config.length is not None
        return total / config.length
    return total / mask.sum(1).clamp(min=1)


def divisor_of(config: LossConfig, lengths: Sequence[int]) -> int:
    """Return the divisor of an update's microbatches: its samples, filtered ones included, or tokens (dapo)."""
    return sum(lengths) if config.kind == "dapo" else len(lengths)


def policy_loss(
    config: LossConfig,
    logp: Tensor,
    gen_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    divisor: float,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    factors: Tensor | None = None,
) -> LossResult:
    """Return the loss of one microbatch; the losses of an update's microbatches add up.

    :param logp: log π_θ of each token in nats [N, T], with gradient, fp32 or better
    :param gen_logp: the generators' claims [N, T], or None; rows with a value that is not finite have no claim and use
        π_gen = π_old, so ratio and weight are 1
    :param advantages: Â of each sample [N]
    :param mask: 1 on the completion's tokens including the end token, 0 on padding [N, T]; there, other tensors may
        hold any value, even nan
    :param divisor: :func:`divisor_of` the whole update
    :param old_logp: log π_old [N, T], if several updates use the same completions
    :param ref_logp: log π_ref [N, T]
    :param factors: factor of each sample's part [N] (default: 1)
    :raises ValueError: for mismatched shapes, a divisor that is not positive, beta without ``ref_logp``, or a kind that
        needs ``gen_logp`` without it.

    Source: see the parts; reductions follow arXiv 2402.03300, 2503.20783 (dr_grpo), 2503.14476 (dapo).
    """
    if divisor <= 0:
        raise ValueError(f"the divisor is {divisor}: an update without samples has no loss")
    batch = _validate_inputs(config, logp, gen_logp, advantages, mask, old_logp, ref_logp)
    keep = keeps_advantage(config, batch)
    per_token = -token_objectives(config, batch, torch.where(keep, advantages, 0.0)[:, None])
    kl = torch.zeros_like(batch.old)
    if batch.ref is not None:
        kl = kl_to_reference(batch.logp, batch.ref, config.log_ratio_bound)
        per_token = per_token + config.beta * kl
    added = sample_losses(config, per_token, batch.mask)
    whole = (added if factors is None else added * factors).sum()
    return LossResult(whole / divisor, _stats(config, batch, keep, kl.detach()))


def _validate_inputs(
    config: LossConfig,
    logp: Tensor,
    gen_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
) -> LossInputs:
    """Validate the inputs and zero the padding first: a later multiplication by 0 could be 0·inf."""
    by_token = {"mask": mask, "gen_logp": gen_logp, "old_logp": old_logp, "ref_logp": ref_logp}
    for name, tensor in {**by_token, "advantages": advantages}.items():
        shape = logp.shape if name in by_token else logp.shape[:1]
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)}, with logp {list(logp.shape)}")
    if config.beta and ref_logp is None:
        raise ValueError(f"beta = {config.beta} needs ref_logp, the reference policy's log-probabilities")
    mask = mask.bool()
    logp = logp.masked_fill(~mask, 0.0)
    old = logp.detach() if old_logp is None else old_logp.detach().masked_fill(~mask, 0.0)
    ref = None if ref_logp is None else ref_logp.detach().masked_fill(~mask, 0.0)
    gen, claimed = old, torch.zeros_like(advantages, dtype=torch.bool)
    if gen_logp is not None:
        claimed = (gen_logp.isfinite() | ~mask).all(1)
        gen = torch.where(claimed[:, None] & mask, gen_logp.detach(), old)
    elif config.kind not in ("grpo", "dr_grpo", "dapo", "nois"):
        raise ValueError(f"the loss {config.kind!r} compares with the generators and needs gen_logp")
    return LossInputs(logp, old, gen, claimed, ref, advantages, mask)


def _stats(config: LossConfig, batch: LossInputs, keep: Tensor, kl: Tensor) -> LossStats:
    """Compute all sums in one transfer from the device."""
    bound = config.log_ratio_bound
    now = batch.logp.detach()
    sign = batch.advantages.sign()[:, None]
    ratio = _ratio(config, batch).detach()
    idle = ((sign > 0) & (ratio > 1 + config.high)) | ((sign < 0) & (ratio < 1 - config.low))
    if config.term == "dis":
        idle = _is_masked(config, ratio) & (sign != 0)
    cut = ratio_of(now if config.term == "vis" else batch.old, batch.gen, bound) > config.cap
    claimed = batch.mask & batch.known[:, None]
    sums = (
        ~keep & (batch.advantages != 0),
        batch.mask,
        claimed,
        idle & batch.mask & (config.term != "nois"),
        cut & claimed & (config.term in ("tis", "vis")),
        ratio_of(now, batch.gen, bound) * claimed,
        (batch.gen - now).clamp(-bound, bound) * claimed,
        kl * batch.mask,
    )
    return LossStats(float(len(keep)), *torch.stack([part.sum().double() for part in sums]).tolist())


@dataclass(frozen=True)
class LossStats:
    """Sums over trained tokens, additive over microbatches; :meth:`means` summarizes them."""

    samples: float = 0.0
    filtered: float = 0.0
    """samples whose advantage the filter or the sequence mask removed"""
    tokens: float = 0.0
    claimed: float = 0.0
    """tokens with a generator's claim"""
    clipped: float = 0.0
    """tokens without gradient because of the clip or the mask of dis"""
    capped: float = 0.0
    """tokens with a weight (tis) or ratio (vis) cut to the cap"""
    ratio: float = 0.0
    """π_θ/π_gen of claimed tokens, before any cap"""
    mismatch: float = 0.0
    """log π_gen − log π_θ of claimed tokens in nats, each clamped to the bound"""
    reference: float = 0.0
    """k3 estimate of KL(π_θ‖π_ref), in nats"""

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(*(own + theirs for own, theirs in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> dict[str, float]:
        """Return shares and means over tokens by name, and filtered samples; means over no token are omitted."""
        of_all = {"clipped": self.clipped, "kl_reference": self.reference}
        of_claimed = {"capped": self.capped, "ratio": self.ratio, "kl_mismatch": self.mismatch}
        result = {name: value / self.tokens for name, value in of_all.items() if self.tokens}
        result |= {name: value / self.claimed for name, value in of_claimed.items() if self.claimed}
        return result | {"filtered": self.filtered}
