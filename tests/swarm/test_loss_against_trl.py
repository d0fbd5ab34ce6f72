"""The same batches through TRL's loss: GRPOTrainer._compute_loss with the attributes it reads."""

from __future__ import annotations

import importlib
from collections import defaultdict
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.swarm.learning.advantages import group_advantages, overlong_penalty
from planaria.swarm.learning.loss import divisor_of, policy_loss
from planaria.swarm.learning.loss_config import LossConfig

pytestmark = pytest.mark.slow  # requires TRL: pip install -c constraints.txt -e ".[trl]"

LENGTH = 9
TOLERANCE = 1e-6
LOSSES = {"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "nois": "grpo", "vis": "grpo", "tis": "grpo"}
LOSSES |= {"sequence_mask": "grpo"}


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    """TRL if installed; imported here because that takes seconds."""
    found: ModuleType = pytest.importorskip("trl")
    found.GRPOTrainer  # noqa: B018  (lazy attribute: imports the trainer and its dependencies)
    return found


@dataclass
class Update:
    """Completions of one update: log-probabilities [N, T] (fp32, as in training), advantages [N] and mask [N, T]."""

    logp: Tensor
    gen: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor

    def part(self, rows: slice) -> Update:
        return Update(*(of[rows] for of in vars(self).values()))


def update(seed: int, rows: int = 8) -> Update:
    """Random completions; log-probabilities differ by about 0.4, so that some ratios are clipped and some are not."""
    draw = torch.Generator().manual_seed(seed)
    logp = -torch.rand(rows, LENGTH, generator=draw) * 3
    gen, old, ref = (logp + 0.4 * torch.randn(logp.shape, generator=draw) for _ in range(3))
    lengths = torch.randint(1, LENGTH + 1, (rows,), generator=draw)
    gen[0] += 1.0  # one failure that is far from its generator
    advantages = torch.randn(rows, generator=draw)
    advantages[0] = -1.0
    mask = (torch.arange(LENGTH)[None, :] < lengths[:, None]).long()
    return Update(logp, gen, old, ref, advantages, mask)


def trainer(trl: ModuleType, config: LossConfig, logp: Tensor, microbatches: int) -> SimpleNamespace:
    """The attributes of a trainer that ``_compute_loss`` reads; its model gives ``logp``."""
    return SimpleNamespace(
        loss_type=LOSSES[config.kind],
        epsilon_low=config.low,
        epsilon_high=config.high,
        beta=config.beta,
        max_completion_length=config.length,
        use_vllm=config.kind == "tis",
        vllm_importance_sampling_correction=True,
        off_policy_mask_threshold=config.mask_threshold if config.kind == "sequence_mask" else None,
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=microbatches),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=microbatches,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )


def theirs(trl: ModuleType, config: LossConfig, of: Update, old: Tensor | None, parts: int) -> tuple[float, Tensor]:
    """TRL's loss and its gradient by log-probabilities, accumulated over equal microbatches."""
    logp, rows = of.logp.clone().requires_grad_(), len(of.logp) // parts
    total = 0.0
    for start in range(0, len(logp), rows):
        some, now = of.part(slice(start, start + rows)), logp[start : start + rows]
        before = now.detach() if old is None else old[start : start + rows]
        nothing = torch.zeros(rows, 0, dtype=torch.long)
        inputs: dict[str, Any] = {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": torch.zeros_like(some.mask),
            "completion_mask": some.mask,
            "advantages": some.advantages,
            "old_per_token_logps": some.gen if config.kind == "vis" else before,
            "sampling_per_token_logps": some.gen,
            "ref_per_token_logps": some.ref,
            # TRL computes these weights during generation; only their use is TRL's here
            "importance_sampling_ratio": torch.exp((before - some.gen) * some.mask).clamp(max=config.cap),
            "num_items_in_batch": of.mask.sum(),
        }
        loss = trl.GRPOTrainer._compute_loss(trainer(trl, config, now, parts), None, inputs)
        loss.backward()
        total += loss.item()
    assert logp.grad is not None
    return total, logp.grad


def ours(config: LossConfig, of: Update, old: Tensor | None) -> tuple[float, Tensor]:
    logp = of.logp.clone().requires_grad_()
    divisor = divisor_of(config, of.mask.sum(1).tolist())
    found = policy_loss(config, logp, of.gen, of.advantages, of.mask, divisor=divisor, old_logp=old, ref_logp=of.ref)
    found.loss.backward()
    assert logp.grad is not None
    return found.loss.item(), logp.grad


def apart(trl: ModuleType, config: LossConfig, of: Update, updates: int, parts: int) -> float:
    """Largest absolute difference of losses and of gradients."""
    old = of.old if updates > 1 else None
    mine, my_gradient = ours(config, of, old)
    its, its_gradient = theirs(trl, config, of, old, parts)
    assert its_gradient.abs().max() > 1e-3
    return max(abs(mine - its), (my_gradient - its_gradient).abs().max().item())


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "nois"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("clip_high", [None, 0.5])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_losses_agree_with_trl(
    trl: ModuleType, kind: str, beta: float, clip_high: float | None, updates: int, parts: int
) -> None:
    length = LENGTH if kind == "dr_grpo" else None
    config = LossConfig(kind=kind, beta=beta, clip_high=clip_high, length=length)
    for seed in range(5):
        assert apart(trl, config, update(seed), updates, parts) <= TOLERANCE


def test_nois_equals_trl_without_vllm_at_one_update_per_round(trl: ModuleType) -> None:
    for seed in range(5):
        assert apart(trl, LossConfig(kind="nois"), update(seed), updates=1, parts=1) <= TOLERANCE


def test_f_tis_equals_trl_s_truncated_loss_with_far_failures_removed(trl: ModuleType) -> None:
    for seed in range(5):
        of = update(seed)
        mine, my_gradient = ours(LossConfig(kind="f_tis"), of, None)
        away = ((of.gen - of.logp) * of.mask).sum(1) / of.mask.sum(1)
        of.advantages = torch.where((of.advantages <= 0) & (away >= 0.5), 0.0, of.advantages)
        its, its_gradient = theirs(trl, LossConfig(kind="tis"), of, None, 1)
        assert (of.advantages == 0).any()
        assert abs(mine - its) <= TOLERANCE
        assert (my_gradient - its_gradient).abs().max() <= TOLERANCE


@given(length=st.integers(0, 120), margin=st.integers(1, 100))
def test_the_length_penalty_is_trl_s(trl: ModuleType, length: int, margin: int) -> None:
    rewards = importlib.import_module(f"{trl.__name__}.rewards")
    punishment = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=margin)
    assert overlong_penalty(length, 100, margin) == pytest.approx(punishment([[0] * length])[0], abs=1e-15)


def test_the_standard_deviation_is_trl_s(trl: ModuleType) -> None:
    rewards = [1.0, 0.0, 0.0, 0.5]
    sigma = trl.trainer.grpo_trainer.nanstd(torch.tensor([rewards]), dim=1).item()
    found = group_advantages(rewards)
    assert found is not None
    assert found[0] == pytest.approx((1.0 - 0.375) / sigma, abs=1e-6)
