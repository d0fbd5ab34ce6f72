"""Memory, devices and precision of a policy: results are equal up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tiny_swarm import byte_tokenizer, policy
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import OptimConfig
from planaria.swarm.assemble import device_of, place_policy
from planaria.swarm.config import PolicyConfig
from planaria.swarm.learning.learner import Learner
from planaria.swarm.learning.loss_config import LossConfig
from planaria.swarm.policy.base import weights_fingerprint
from planaria.swarm.policy.huggingface import HuggingFacePolicy
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.policy.reading import pad, read, rows_at_once, token_logps
from planaria.swarm.rollout import Rollout
from planaria.swarm.tasks.base import TaskProblem

PAIRS = [([5, 6, 7 + n % 9], [1 + n % 7, 2, 200 - n, 256][: 1 + n % 4]) for n in range(40)]
VOCAB = 257


class Watched(LlamaPolicy):
    """A policy that records the largest number of logits made at once."""

    def __init__(self, plain: LlamaPolicy, room: int) -> None:
        super().__init__(copy.deepcopy(plain._model), plain.tokenizer)
        self.room, self.most = room, 0

    def head(self, states: Tensor) -> Tensor:
        found = super().head(states)
        self.most = max(self.most, found.numel())
        return found


def rollouts() -> list[Rollout]:
    return [
        Rollout(TaskProblem(n, "", ""), tuple(prompt), "", tuple(ids), True, None, peer="a", advantage=(-1.0) ** n)
        for n, (prompt, ids) in enumerate(PAIRS)
    ]


@pytest.mark.parametrize("room", [VOCAB * 7 * 9, VOCAB * 7, VOCAB * 5, VOCAB, 1])
def test_logits_at_once_stay_within_the_limit(room: int) -> None:
    plain, tight = policy(), Watched(policy(), room)
    tight.room = room
    whole, parts = read(plain, PAIRS, 0.8, 5), read(tight, PAIRS, 0.8, 5)
    assert tight.most <= max(room, VOCAB)
    for ours, theirs in zip(whole, parts, strict=True):
        assert np.array_equal(ours.ranks, theirs.ranks)
        for name in ("logps", "entropies", "variances", "supports"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("room", [VOCAB * 5, 1])
def test_gradients_in_parts_are_equal(room: int) -> None:
    plain, tight = policy(), Watched(policy(), room)
    for who in (plain, tight):
        batch = pad(PAIRS)
        (token_logps(who, batch, 0.8) * batch.mask).square().sum().backward()  # type: ignore[no-untyped-call]
    assert tight.most <= max(room, VOCAB)
    for ours, theirs in zip(plain.module.parameters(), tight.module.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.abs().max() > 0
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_an_update_in_parts_is_equal_within_a_millionth() -> None:
    plain, tight = policy(), Watched(policy(), VOCAB * 5)
    found = [
        Learner(who, LossConfig(kind="nois"), OptimConfig(lr=1e-3), 1.0, 9).learn(0, rollouts())
        for who in (plain, tight)
    ]
    assert found[0].loss == pytest.approx(found[1].loss, abs=1e-6)
    assert found[0].grad_norm == pytest.approx(found[1].grad_norm, rel=1e-5)
    assert tight.most <= VOCAB * 5


def test_an_update_is_one_pass_of_96_rows_by_default() -> None:
    assert rows_at_once(policy(), 64, 96) == 96 and rows_at_once(policy(), 64, 256) == 256
    large = policy()
    large.vocab = 151_936
    assert [rows_at_once(large, width, 96) for width in (4, 64, 1000)] == [96, 6, 1]


def test_missing_hardware_is_reported_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(PolicyConfig(device="auto")).type == "cpu"
    with pytest.raises(UserError, match=r"policy.device = 'cuda': PyTorch finds no CUDA device on this machine"):
        device_of(PolicyConfig(device="cuda"))
    with pytest.raises(UserError, match=r"policy.precision = 'bf16' needs a CUDA device"):
        device_of(PolicyConfig(device="auto", precision="bf16"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(PolicyConfig(device="auto", precision="bf16")).type == "cuda"
    assert device_of(PolicyConfig()).type == "cpu"


def test_logits_mb_sets_the_limit() -> None:
    assert place_policy(policy(), PolicyConfig(logits_mb=1)).room == 2**18  # type: ignore[attr-defined]
    with pytest.raises(ValidationError):
        PolicyConfig(threads=0)


@pytest.mark.parametrize("act", ["read", "sample", "learn"])
def test_bf16_is_close_and_keeps_fp32_weights(act: str) -> None:
    plain, coarse = policy(), policy()
    coarse.bf16 = True
    does: dict[str, Callable[[LlamaPolicy], float]] = {
        "read": lambda who: float(read(who, PAIRS[:1], 1.0)[0].logps[0]),
        "sample": lambda who: who.sample([[1, 2]], 1, 1, 0.0, 0, torch.Generator().manual_seed(1))[0][0].logps[0],
        "learn": lambda who: (
            Learner(who, LossConfig(kind="nois"), OptimConfig(lr=1e-3), 1.0, 9).learn(0, rollouts()).grad_norm
        ),
    }
    fine, rough = does[act](plain), does[act](coarse)
    assert fine != rough and fine == pytest.approx(rough, rel=0.05, abs=0.05)
    assert {parameter.dtype for parameter in coarse.module.parameters()} == {torch.float32}
    assert (weights_fingerprint(plain.module) == weights_fingerprint(coarse.module)) is (act != "learn")


@pytest.mark.parametrize(("kind", "splits"), [("LlamaConfig", True), ("Gemma2Config", False)])
def test_a_transformers_model_is_split_unless_it_transforms_its_logits(kind: str, splits: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    rest = {"vocab_size": VOCAB, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes, **rest))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    who = HuggingFacePolicy(model, byte_tokenizer())
    assert who.splits is splits
    whole = token_logps(who, pad(PAIRS), 1.0)
    whole_gradients = torch.autograd.grad(whole[pad(PAIRS).mask].sum(), list(model.parameters()), allow_unused=True)
    who.room = VOCAB
    parts = token_logps(who, pad(PAIRS), 1.0)
    gradients = torch.autograd.grad(parts[pad(PAIRS).mask].sum(), list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(whole[pad(PAIRS).mask], parts[pad(PAIRS).mask], atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(whole_gradients, gradients, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_policy_on_a_gpu_reads_samples_and_learns(precision: str) -> None:
    config = PolicyConfig.model_validate({"device": "cuda", "precision": precision})
    here, there = policy(), place_policy(policy(), config)
    ours, theirs = (read(who, PAIRS, 1.0)[3].logps for who in (here, there))
    np.testing.assert_allclose(ours, theirs, atol=0.1 if precision == "bf16" else 1e-3)
    assert len(there.sample([[1, 2], [3]], 2, 5, 1.0, 0, torch.Generator().manual_seed(1))[1]) == 2
    assert Learner(there, LossConfig(kind="nois"), OptimConfig(lr=1e-3), 1.0, 9).learn(0, rollouts()).grad_norm > 0
