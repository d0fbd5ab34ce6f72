"""The losses of decentralised GRPO: one menu, in which each entry is another by one line.

Notation: π_θ is the policy that is trained, π_old the policy that the round's updates began with, π_gen the policy that
sampled a completion, as its peer claims it. R = π_θ/π_old. With one update a round π_old = sg(π_θ): R is 1 and its
gradient is ∇log π_θ. All probabilities are of single tokens.

| kind          | the term of one token                      | a completion's share of the loss |
|---------------|--------------------------------------------|----------------------------------|
| grpo          | min(R·Â, clip(R, 1−ε, 1+ε')·Â)             | mean of its tokens               |
| dr_grpo       | as grpo (with advantages without σ)        | sum of its tokens / a constant   |
| dapo          | as grpo, with a higher ε'                  | sum (the divisor counts tokens)  |
| nois          | R·Â                                        | as grpo                          |
| vis           | as grpo, with R = min(π_θ/π_gen, C)        | as grpo                          |
| tis           | as grpo, times sg(min(π_old/π_gen, C))     | as grpo                          |
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
    """How far each completion is from the policy, in nats: [N, T] log-probabilities and mask → [N], without gradient.

    With x = log π_gen − log π_θ of a token that π_gen drew, x itself (k1) and e^x − x − 1 (k3) estimate a divergence of
    π_θ from π_gen. k1_mean and k3_mean are means over the completion's own tokens, never over padding; k3_sum is
    their sum. k3 is an alarm for single improbable tokens (x = 7 gives 1088) and may be inf.
    Source: the estimators are J. Schulman's (Approximating KL divergence, 2020); arXiv 2605.22537 filters by k3.
    """
    x = (gen_logp - logp.detach()).masked_fill(~mask.bool(), 0.0)
    per_token = x if kind == "k1_mean" else torch.expm1(x) - x
    total = per_token.sum(1)
    return total if kind == "k3_sum" else total / mask.sum(1).clamp(min=1)


def ratio_of(logp: Tensor, other: Tensor, bound: float) -> Tensor:
    """π/π' of log-probabilities, between e^−bound and e^bound; beyond them the gradient is 0, never inf or nan."""
    return (logp - other).clamp(-bound, bound).exp()


def clipped_term(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """min(R·Â, clip(R, 1 − low, 1 + high)·Â), to be maximised. Source: arXiv 2402.03300, equation 3."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def kl_to_reference(logp: Tensor, ref_logp: Tensor, bound: float) -> Tensor:
    """k3 estimate of KL(π_θ‖π_ref) of each token: e^x − x − 1 with x = log π_ref − log π_θ.

    Only x > bound is cut off. Where the reference would hardly say what the policy says, x is far below 0, all is
    finite, and the pull back must not vanish. Source: arXiv 2402.03300, equation 4.
    """
    x = (ref_logp - logp).clamp(max=bound)
    return torch.expm1(x) - x


@dataclass(frozen=True)
class Batch:
    """What the formulas below read, free of garbage: padding holds 0 everywhere."""

    logp: Tensor
    """log π_θ [N, T], with gradient"""
    old: Tensor
    """log π_old [N, T]"""
    gen: Tensor
    """log π_gen [N, T]; log π_old where nobody knows it"""
    known: Tensor
    """rows whose generator told: bool [N]"""
    ref: Tensor | None
    """log π_ref [N, T]"""
    advantages: Tensor
    """Â [N]"""
    mask: Tensor
    """tokens to train on: bool [N, T]"""


def kept(config: LossConfig, batch: Batch) -> Tensor:
    """Which samples keep their advantage: bool [N].

    The filter of F-TIS wants failures known to be near: Â > 0 or divergence < γ; one whose generator told nothing is
    not known to be near. The mask of DeepSeek-V3.2 drops failures that are far: Â < 0 and mean x > δ; where the
    generator told nothing, far from π_old.
    Source: arXiv 2605.22537; arXiv 2512.02556, equation 9.
    """
    if config.kind.startswith("f_"):
        kind, threshold = config.filter
        near = batch.known & (divergence(kind, batch.logp, batch.gen, batch.mask) < threshold)
        return (batch.advantages > 0) | near
    if config.kind == "sequence_mask":
        far = divergence("k1_mean", batch.logp, batch.gen, batch.mask) > config.mask_threshold
        return (batch.advantages >= 0) | ~far
    return torch.ones_like(batch.known)


def terms(config: LossConfig, batch: Batch, advantage: Tensor) -> Tensor:
    """What one token earns, to be maximised: [N, T], given the advantages that were kept [N, 1]: the menu's column.

    The clip bounds what a success earns; a failure's ratio it leaves free above, where a generator that claims to have
    found its own text all but impossible would take the whole gradient. So vis bounds that too, by C.

    Source: arXiv 2511.09780 (nois: the objective of decentralised GRPO), 2605.22537 (vis, tis), 2505.07291 (the bound
    on failures, as two-sided clipping).
    """
    bound = config.log_ratio_bound
    ratio = _ratio(config, batch)
    if config.term == "nois":
        return ratio * advantage
    clipped = clipped_term(ratio, advantage, config.clip_low, config.high)
    if config.term == "tis":
        return ratio_of(batch.old, batch.gen, bound).clamp(max=config.cap) * clipped
    return clipped


def _ratio(config: LossConfig, batch: Batch) -> Tensor:
    """R of the menu: [N, T]."""
    if config.term == "vis":
        return ratio_of(batch.logp, batch.gen, config.log_ratio_bound).clamp(max=config.cap)
    return ratio_of(batch.logp, batch.old, config.log_ratio_bound)


def shares(config: LossConfig, per_token: Tensor, mask: Tensor) -> Tensor:
    """What each sample adds to the loss, before the divisor: [N, T] → [N]."""
    total = (per_token * mask).sum(1)
    if config.kind == "dapo":
        return total
    if config.kind == "dr_grpo":
        assert config.length is not None
        return total / config.length
    return total / mask.sum(1).clamp(min=1)


def divisor_of(config: LossConfig, lengths: Sequence[int]) -> int:
    """What ``policy_loss`` divides by: samples, or for dapo tokens, given the lengths of all completions of an update.

    All microbatches of one update are given this same number. Filtered samples count; those of groups without spread
    have no advantage, are not trained on and do not.
    """
    return sum(lengths) if config.kind == "dapo" else len(lengths)


def policy_loss(
    config: LossConfig,
    logp: Tensor,
    gen_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    divisor: float,
    known: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    factors: Tensor | None = None,
) -> LossResult:
    """The loss of one microbatch; the losses of all microbatches of an update add up to the update's.

    ``logp`` [N, T]: log π_θ of each token in nats, with gradient, fp32 or better. ``mask`` [N, T]: 1 on the tokens of
    the completion, its end token included, 0 on padding, where every other tensor may hold anything, nan too.
    ``gen_logp`` [N, T]: the generators' claims, None where nobody made any; ``known`` [N] bool says which rows have one
    (all unless given). Rows without, and rows with a claim that is not finite, count as π_gen = π_old: ratio and weight
    are 1. ``old_logp`` [N, T]: log π_old where several updates use the same completions; ``ref_logp`` [N, T]: the
    reference's. ``advantages`` [N]. ``factors`` [N]: on all that a sample adds (1 unless given). ``divisor``:
    ``divisor_of`` the whole update, not of this microbatch.

    Raises ValueError for shapes that do not fit (broadcasting would hide them), a divisor that is not positive, a beta
    without ``ref_logp``, and a kind that compares with generators without ``gen_logp``. Source: see the parts; what is
    summed over what is arXiv 2402.03300, 2503.20783 (dr_grpo), 2503.14476 (dapo).
    """
    if divisor <= 0:
        raise ValueError(f"the divisor is {divisor}: an update without samples has no loss")
    batch = _batch(config, logp, gen_logp, advantages, mask, known, old_logp, ref_logp)
    keep = kept(config, batch)
    per_token = -terms(config, batch, torch.where(keep, advantages, 0.0)[:, None])
    kl = torch.zeros_like(batch.old)
    if batch.ref is not None:
        kl = kl_to_reference(batch.logp, batch.ref, config.log_ratio_bound)
        per_token = per_token + config.beta * kl
    added = shares(config, per_token, batch.mask)
    whole = (added if factors is None else added * factors).sum()
    return LossResult(whole / divisor, _stats(config, batch, keep, kl.detach()))


def _batch(
    config: LossConfig,
    logp: Tensor,
    gen_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    known: Tensor | None,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
) -> Batch:
    """Checked, and padding emptied before anything is computed: what is multiplied by 0 afterwards may be 0·inf."""
    given = {"mask": mask, "gen_logp": gen_logp, "old_logp": old_logp, "ref_logp": ref_logp}
    for name, tensor in {**given, "advantages": advantages, "known": known}.items():
        shape = logp.shape if name in given else logp.shape[:1]
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)}, beside logp {list(logp.shape)}")
    if config.beta and ref_logp is None:
        raise ValueError(f"beta = {config.beta} needs ref_logp, the reference policy's log-probabilities")
    mask = mask.bool()
    logp = logp.masked_fill(~mask, 0.0)
    old = logp.detach() if old_logp is None else old_logp.detach().masked_fill(~mask, 0.0)
    ref = None if ref_logp is None else ref_logp.detach().masked_fill(~mask, 0.0)
    gen, told = old, torch.zeros_like(advantages, dtype=torch.bool)
    if gen_logp is not None:
        told = (gen_logp.isfinite() | ~mask).all(1) & (~told if known is None else known)
        gen = torch.where(told[:, None] & mask, gen_logp.detach(), old)
    elif config.kind not in ("grpo", "dr_grpo", "dapo", "nois"):
        raise ValueError(f"the loss {config.kind!r} compares with who generated and needs gen_logp")
    return Batch(logp, old, gen, told, ref, advantages, mask)


def _stats(config: LossConfig, batch: Batch, keep: Tensor, kl: Tensor) -> LossStats:
    """All sums in one transfer from the device."""
    bound, now, sign = config.log_ratio_bound, batch.logp.detach(), batch.advantages.sign()[:, None]
    ratio = _ratio(config, batch).detach()
    idle = ((sign > 0) & (ratio > 1 + config.high)) | ((sign < 0) & (ratio < 1 - config.clip_low))
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
    """Sums over the tokens that were trained on; those of microbatches add up. ``means`` is what one reads."""

    samples: float = 0.0
    filtered: float = 0.0
    """samples whose advantage the filter or the sequence mask took"""
    tokens: float = 0.0
    claimed: float = 0.0
    """tokens whose generator told their log-probability"""
    clipped: float = 0.0
    """tokens that the clip gives no gradient"""
    capped: float = 0.0
    """tokens whose weight (tis) or ratio (vis) was cut to the cap"""
    ratio: float = 0.0
    """π_θ/π_gen of claimed tokens, before any cap"""
    mismatch: float = 0.0
    """log π_gen − log π_θ of claimed tokens, in nats, each cut off at the bound"""
    reference: float = 0.0
    """k3 estimate of KL(π_θ‖π_ref), in nats"""

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> dict[str, float]:
        """Shares and means over tokens, by name, and samples filtered; what no token speaks for is left out."""
        of_all = {"clipped": self.clipped, "kl_reference": self.reference}
        of_claimed = {"capped": self.capped, "ratio": self.ratio, "kl_mismatch": self.mismatch}
        found = {name: value / self.tokens for name, value in of_all.items() if self.tokens}
        found |= {name: value / self.claimed for name, value in of_claimed.items() if self.claimed}
        return found | {"filtered": self.filtered}
