"""Readings of completions: their numbers, and memory, devices and precision of the policy that reads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.swarm.assemble import place_policy, select_device
from planaria.swarm.checks.tokens import DuplicatesCheck
from planaria.swarm.config.policy_config import PolicyConfig
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.learner import Learner
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.policy.base import SampledCompletion, weights_fingerprint
from planaria.swarm.policy.huggingface import HuggingFacePolicy
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.policy.reading import UNREAD, pad, read_completions, token_logps
from planaria.swarm.tasks.base import TaskProblem
from support.swarm.tiny_swarm import CONTEXT, byte_tokenizer, case, policy, reading

PAIRS = [([5, 6, 7], [1, 2, 256]), ([9], [3]), ([4, 4], [250, 10, 11, 12, 13])]


@pytest.fixture(scope="module")
def reader() -> LlamaPolicy:
    return policy()


def drawn(who: LlamaPolicy, rows: int, top_k: int, temperature: float = 1.0) -> list[tuple[list[int], tuple[int, ...]]]:
    prompts = [[n % 200, 3 * n % 200] for n in range(rows)]
    texts = who.sample(prompts, 1, 12, temperature, top_k, torch.Generator().manual_seed(7))

    def whole(found: SampledCompletion) -> tuple[int, ...]:
        return (*found.ids, who.end) if found.ended else found.ids

    return [(prompt, whole(found)) for prompt, (found,) in zip(prompts, texts, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_reading_equals_one_computed_token_by_token(reader: LlamaPolicy, temperature: float) -> None:
    for (prompt, ids), found in zip(PAIRS, read_completions(reader, PAIRS, temperature), strict=True):
        for place, token in enumerate(ids):
            before = torch.tensor([[*prompt, *ids[:place]]])
            p = (reader.logits(before)[0, -1].detach().double() / temperature).softmax(0).numpy()
            entropy = float(-(p * np.log(p)).sum())
            assert found.logps[place] == pytest.approx(math.log(p[token]), abs=1e-4)
            assert found.ranks[place] == (p > p[token]).sum()
            assert found.entropies[place] == pytest.approx(entropy, abs=1e-4)
            assert found.variances[place] == pytest.approx(float((p * (-np.log(p) - entropy) ** 2).sum()), abs=1e-3)


def test_a_reading_does_not_depend_on_padding_or_batch(reader: LlamaPolicy) -> None:
    together = read_completions(reader, PAIRS, 1.0)
    for alone, found in zip((read_completions(reader, [pair], 1.0)[0] for pair in PAIRS), together, strict=True):
        assert np.array_equal(alone.ranks, found.ranks)
        for name in ("logps", "entropies", "variances"):
            assert np.allclose(getattr(alone, name), getattr(found, name), atol=1e-5)
    by_one = read_completions(reader, PAIRS, 1.0, rows=1)
    assert [found.logps.shape for found in by_one] == [(3,), (1,), (5,)]
    assert read_completions(reader, [], 1.0) == []


def test_training_log_probabilities_equal_those_of_readings(reader: LlamaPolicy) -> None:
    batch = pad(PAIRS)
    logps = token_logps(reader, batch, 0.8)
    assert logps.requires_grad
    for row, mask, found in zip(logps, batch.mask, read_completions(reader, PAIRS, 0.8), strict=True):
        assert np.allclose(row[mask].detach().numpy(), found.logps, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 300])
def test_drawn_is_the_probability_of_sampling_a_completion(reader: LlamaPolicy, k: int) -> None:
    for (prompt, ids), found in zip(PAIRS, read_completions(reader, PAIRS, 0.7, k), strict=True):
        expected = 0.0
        for place, token in enumerate(ids):
            p = (reader.logits(torch.tensor([[*prompt, *ids[:place]]]))[0, -1].detach().double() / 0.7).softmax(0)
            expected += math.log(p[token] / p.topk(min(k, 257)).values.sum())
        assert found.draw_logp == pytest.approx(expected, abs=1e-3)
    assert read_completions(reader, PAIRS[:1], 0.7)[0].draw_logp == pytest.approx(
        float(read_completions(reader, PAIRS[:1], 0.7)[0].logps.sum())
    )


def test_repeated_honest_samples_are_not_taken_for_copies() -> None:
    unsure = policy(init_std=0.1)
    prompts = [[n % 200, 7] for n in range(100)]
    texts = unsure.sample(prompts, 12, 2, 1.0, 3, torch.Generator().manual_seed(0))
    pairs = [(prompt, found.ids) for prompt, draws in zip(prompts, texts, strict=True) for found in draws]
    readings = read_completions(unsure, pairs, 1.0, 3)
    cases = [
        case(problem=n // 12, index=n % 12, text=str(ids), read=found)
        for n, ((_, ids), found) in enumerate(zip(pairs, readings, strict=True))
    ]
    assert not DuplicatesCheck().examine(cases, CONTEXT).rejected


def test_surprisal_of_own_samples_is_about_standard_normal(reader: LlamaPolicy) -> None:
    scores = np.array([found.surprisal for found in read_completions(reader, drawn(reader, 600, 0), 1.0)])
    assert abs(scores.mean()) < 4 / math.sqrt(600) and 0.9 < scores.std() < 1.1


def test_random_letters_have_a_large_surprisal(reader: LlamaPolicy) -> None:
    rng = np.random.default_rng(0)
    pairs = [([5, 6], rng.integers(0, 256, 12).tolist()) for _ in range(50)]
    assert np.median([found.surprisal for found in read_completions(reader, pairs, 1.0)]) > 3


def test_surprisal_is_zero_for_certain_tokens_and_infinite_for_impossible_ones() -> None:
    assert reading([0.0, 0.0], entropy=0.0, variance=0.0).surprisal == 0
    assert reading([0.0, -3.0], entropy=0.0, variance=0.0).surprisal == math.inf
    assert UNREAD.surprisal == 0
    assert reading([-3.0, -2.0], entropy=1.0, variance=2.0).surprisal == pytest.approx(3 / 2)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_samples_from_a_support_are_within_it(reader: LlamaPolicy, k: int) -> None:
    pairs = drawn(reader, 500, k)
    found = read_completions(reader, pairs, 1.0)
    ranks = np.concatenate([r.ranks for r in found])
    assert ranks.max() == k - 1, "the check must not be looser than sampling"


def test_samples_from_more_tokens_are_outside_a_small_support(reader: LlamaPolicy) -> None:
    found = read_completions(reader, drawn(reader, 300, 0), 1.0)
    assert np.mean([r.ranks.max() >= 3 for r in found]) > 0.9


ROWS = [([5, 6, 7 + n % 9], [1 + n % 7, 2, 200 - n, 256][: 1 + n % 4]) for n in range(40)]
VOCAB = 257
NOIS = SwarmConfig.model_validate({"loss": {"kind": "nois"}, "optim": {"lr": 1e-3}, "rounds": {"count": 9}})


class Watched(LlamaPolicy):
    """A policy that records the largest number of logits made at once."""

    def __init__(self, plain: LlamaPolicy, room: int) -> None:
        super().__init__(copy.deepcopy(plain._model), plain.tokenizer)
        self.max_logits, self.most = room, 0

    def head(self, states: Tensor) -> Tensor:
        found = super().head(states)
        self.most = max(self.most, found.numel())
        return found


def rollouts() -> list[Rollout]:
    return [
        Rollout(TaskProblem(n, "", ""), tuple(prompt), "", tuple(ids), True, None, peer="a", advantage=(-1.0) ** n)
        for n, (prompt, ids) in enumerate(ROWS)
    ]


@pytest.mark.parametrize("room", [VOCAB * 7 * 9, VOCAB * 7, VOCAB * 5, VOCAB, 1])
def test_logits_at_once_stay_within_the_limit(room: int) -> None:
    plain, tight = policy(), Watched(policy(), room)
    whole, parts = read_completions(plain, ROWS, 0.8, 5), read_completions(tight, ROWS, 0.8, 5)
    assert tight.most <= max(room, VOCAB)
    for ours, theirs in zip(whole, parts, strict=True):
        assert np.array_equal(ours.ranks, theirs.ranks)
        for name in ("logps", "entropies", "variances", "supports"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("room", [VOCAB * 5, 1])
def test_gradients_in_parts_are_equal(room: int) -> None:
    plain, tight = policy(), Watched(policy(), room)
    for who in (plain, tight):
        batch = pad(ROWS)
        (token_logps(who, batch, 0.8) * batch.mask).square().sum().backward()  # type: ignore[no-untyped-call]
    assert tight.most <= max(room, VOCAB)
    for ours, theirs in zip(plain.module.parameters(), tight.module.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.abs().max() > 0
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_an_update_in_parts_is_equal_within_a_millionth() -> None:
    plain, tight = policy(), Watched(policy(), VOCAB * 5)
    found = [Learner(NOIS, who).learn(0, rollouts()) for who in (plain, tight)]
    assert found[0].loss == pytest.approx(found[1].loss, abs=1e-6)
    assert found[0].grad_norm == pytest.approx(found[1].grad_norm, rel=1e-5)
    assert tight.most <= VOCAB * 5


def test_missing_hardware_is_reported_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device(PolicyConfig(device="auto")).type == "cpu"
    with pytest.raises(UserError, match=r"policy.device = 'cuda': PyTorch finds no CUDA device on this machine"):
        select_device(PolicyConfig(device="cuda"))
    with pytest.raises(UserError, match=r"policy.precision = 'bf16' needs a CUDA device"):
        select_device(PolicyConfig(device="auto", precision="bf16"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert select_device(PolicyConfig(device="auto", precision="bf16")).type == "cuda"
    assert select_device(PolicyConfig()).type == "cpu"


@pytest.mark.parametrize("act", ["read", "sample", "learn"])
def test_bf16_is_close_and_keeps_fp32_weights(act: str) -> None:
    plain, coarse = policy(), policy()
    coarse.bf16 = True
    does: dict[str, Callable[[LlamaPolicy], float]] = {
        "read": lambda who: float(read_completions(who, ROWS[:1], 1.0)[0].logps[0]),
        "sample": lambda who: who.sample([[1, 2]], 1, 1, 0.0, 0, torch.Generator().manual_seed(1))[0][0].logps[0],
        "learn": lambda who: Learner(NOIS, who).learn(0, rollouts()).grad_norm,
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
    whole = token_logps(who, pad(ROWS), 1.0)
    whole_gradients = torch.autograd.grad(whole[pad(ROWS).mask].sum(), list(model.parameters()), allow_unused=True)
    who.max_logits = VOCAB
    parts = token_logps(who, pad(ROWS), 1.0)
    gradients = torch.autograd.grad(parts[pad(ROWS).mask].sum(), list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(whole[pad(ROWS).mask], parts[pad(ROWS).mask], atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(whole_gradients, gradients, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_policy_on_a_gpu_reads_samples_and_learns(precision: str) -> None:
    config = PolicyConfig.model_validate({"device": "cuda", "precision": precision})
    here, there = policy(), place_policy(policy(), config)
    ours, theirs = (read_completions(who, ROWS, 1.0)[3].logps for who in (here, there))
    np.testing.assert_allclose(ours, theirs, atol=0.1 if precision == "bf16" else 1e-3)
    assert len(there.sample([[1, 2], [3]], 2, 5, 1.0, 0, torch.Generator().manual_seed(1))[1]) == 2
    assert Learner(NOIS, there).learn(0, rollouts()).grad_norm > 0
