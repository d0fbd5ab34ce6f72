"""Readings: log-probabilities and statistics of given completions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_swarm import CONTEXT, case, policy, reading

from planaria.swarm.checks.tokens import DuplicatesCheck
from planaria.swarm.policy.base import SampledCompletion
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.policy.reading import UNREAD, pad, read, token_logps

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
    for (prompt, ids), found in zip(PAIRS, read(reader, PAIRS, temperature), strict=True):
        for place, token in enumerate(ids):
            before = torch.tensor([[*prompt, *ids[:place]]])
            p = (reader.logits(before)[0, -1].detach().double() / temperature).softmax(0).numpy()
            entropy = float(-(p * np.log(p)).sum())
            assert found.logps[place] == pytest.approx(math.log(p[token]), abs=1e-4)
            assert found.ranks[place] == (p > p[token]).sum()
            assert found.entropies[place] == pytest.approx(entropy, abs=1e-4)
            assert found.variances[place] == pytest.approx(float((p * (-np.log(p) - entropy) ** 2).sum()), abs=1e-3)


def test_a_reading_does_not_depend_on_padding_or_batch(reader: LlamaPolicy) -> None:
    together = read(reader, PAIRS, 1.0)
    for alone, found in zip((read(reader, [pair], 1.0)[0] for pair in PAIRS), together, strict=True):
        assert np.array_equal(alone.ranks, found.ranks)
        for name in ("logps", "entropies", "variances"):
            assert np.allclose(getattr(alone, name), getattr(found, name), atol=1e-5)
    by_one = read(reader, PAIRS, 1.0, rows=1)
    assert [found.logps.shape for found in by_one] == [(3,), (1,), (5,)]
    assert read(reader, [], 1.0) == []


def test_the_mask_selects_the_completion() -> None:
    batch = pad(PAIRS)
    assert batch.tokens.shape == (3, 7) and batch.mask.shape == (3, 6)
    for (_, ids), row, mask in zip(PAIRS, batch.tokens, batch.mask, strict=True):
        assert row[1:][mask].tolist() == ids


def test_training_log_probabilities_equal_those_of_readings(reader: LlamaPolicy) -> None:
    batch = pad(PAIRS)
    logps = token_logps(reader, batch, 0.8)
    assert logps.requires_grad
    for row, mask, found in zip(logps, batch.mask, read(reader, PAIRS, 0.8), strict=True):
        assert np.allclose(row[mask].detach().numpy(), found.logps, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 300])
def test_drawn_is_the_probability_of_sampling_a_completion(reader: LlamaPolicy, k: int) -> None:
    for (prompt, ids), found in zip(PAIRS, read(reader, PAIRS, 0.7, k), strict=True):
        expected = 0.0
        for place, token in enumerate(ids):
            p = (reader.logits(torch.tensor([[*prompt, *ids[:place]]]))[0, -1].detach().double() / 0.7).softmax(0)
            expected += math.log(p[token] / p.topk(min(k, 257)).values.sum())
        assert found.drawn == pytest.approx(expected, abs=1e-3)
    assert read(reader, PAIRS[:1], 0.7)[0].drawn == pytest.approx(float(read(reader, PAIRS[:1], 0.7)[0].logps.sum()))


def test_repeated_honest_samples_are_not_taken_for_copies() -> None:
    unsure = policy(init_std=0.1)
    prompts = [[n % 200, 7] for n in range(100)]
    texts = unsure.sample(prompts, 12, 2, 1.0, 3, torch.Generator().manual_seed(0))
    pairs = [(prompt, found.ids) for prompt, draws in zip(prompts, texts, strict=True) for found in draws]
    readings = read(unsure, pairs, 1.0, 3)
    cases = [
        case(problem=n // 12, index=n % 12, text=str(ids), read=found)
        for n, ((_, ids), found) in enumerate(zip(pairs, readings, strict=True))
    ]
    assert not DuplicatesCheck().examine(cases, CONTEXT).refused


def test_surprisal_of_own_samples_is_about_standard_normal(reader: LlamaPolicy) -> None:
    scores = np.array([found.surprisal for found in read(reader, drawn(reader, 600, 0), 1.0)])
    assert abs(scores.mean()) < 4 / math.sqrt(600) and 0.9 < scores.std() < 1.1


def test_random_letters_have_a_large_surprisal(reader: LlamaPolicy) -> None:
    rng = np.random.default_rng(0)
    pairs = [([5, 6], rng.integers(0, 256, 12).tolist()) for _ in range(50)]
    assert np.median([found.surprisal for found in read(reader, pairs, 1.0)]) > 3


def test_surprisal_is_zero_for_certain_tokens_and_infinite_for_impossible_ones() -> None:
    assert reading([0.0, 0.0], entropy=0.0, variance=0.0).surprisal == 0
    assert reading([0.0, -3.0], entropy=0.0, variance=0.0).surprisal == math.inf
    assert UNREAD.surprisal == 0
    assert reading([-3.0, -2.0], entropy=1.0, variance=2.0).surprisal == pytest.approx(3 / 2)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_samples_from_a_support_are_within_it(reader: LlamaPolicy, k: int) -> None:
    pairs = drawn(reader, 500, k)
    found = read(reader, pairs, 1.0)
    ranks = np.concatenate([r.ranks for r in found])
    assert ranks.max() == k - 1, "the check must not be looser than sampling"


def test_samples_from_more_tokens_are_outside_a_small_support(reader: LlamaPolicy) -> None:
    found = read(reader, drawn(reader, 300, 0), 1.0)
    assert np.mean([r.ranks.max() >= 3 for r in found]) > 0.9
