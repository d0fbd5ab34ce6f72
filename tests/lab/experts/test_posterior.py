"""The mixture against brute-force probabilities, and at the limits of floating point."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.lab.experts import posterior
from planaria.lab.experts.posterior import (
    forward_passes_per_token,
    keep_strongest,
    log_mixture,
    log_weights,
    mean_expert_logps,
)

VOCAB, LENGTH = 3, 4


def toy_experts(experts: int, seed: int) -> Tensor:
    """Return ln p_j(next | previous token) of random Markov chains, [E, V + 1, V]; row V is the start."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(experts, VOCAB + 1, VOCAB, generator=generator, dtype=torch.float64)).log_softmax(-1)


def token_logps(chains: Tensor, texts: Tensor) -> Tensor:
    """Return [E, N, T] of texts [N, T]."""
    before = torch.cat((torch.full_like(texts[:, :1], VOCAB), texts[:, :-1]), 1)
    return chains[:, before, texts]


def all_texts() -> Tensor:
    return torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))


def test_the_mixture_is_the_brute_force_probability_of_the_text() -> None:
    """Σ_t ln p(x_t | x_<t) must be ln Σ_j π_j p_j(x), multiplied out, for all 81 texts."""
    chains, texts = toy_experts(3, seed=1), all_texts()
    pi = [0.5, 0.3, 0.2]
    logps = token_logps(chains, texts)
    found = log_mixture(logps, log_weights(logps, torch.tensor(pi, dtype=torch.float64).log())).sum(-1).exp()
    for n in range(len(texts)):
        plain = sum(weight * math.prod(logps[j, n].exp().tolist()) for j, weight in enumerate(pi))
        assert float(found[n]) == pytest.approx(plain, rel=1e-9)
    assert float(found.sum()) == pytest.approx(1, abs=1e-9)


@given(st.integers(1, 5), st.integers(0, 1000))
def test_the_mixture_is_within_log_e_of_the_best_expert_and_no_worse_than_the_mean(experts: int, seed: int) -> None:
    logps = token_logps(toy_experts(experts, seed), all_texts())
    uniform = posterior.uniform_prior(experts)
    whole = log_mixture(logps, log_weights(logps, uniform)).sum(-1)
    assert (whole >= logps.sum(-1).max(0).values - math.log(experts) - 1e-9).all()
    # Weights that do not depend on the text give lower log-probabilities on average (Jensen).
    assert (whole >= mean_expert_logps(logps, uniform).sum(-1) - 1e-9).all()


@given(st.integers(0, 1000), st.sampled_from([1e2, 1e4, 1e30]))
def test_extreme_gaps_give_finite_values(seed: int, gap: float) -> None:
    logps = token_logps(toy_experts(3, seed), all_texts())
    logps[0] -= gap
    found = log_mixture(logps, log_weights(logps, posterior.uniform_prior(3)))
    assert found.isfinite().all()


def test_an_expert_that_considers_the_text_impossible_is_excluded() -> None:
    logps = torch.full((2, 1, 3), -1.0, dtype=torch.float64)
    logps[0, 0, 0] = -math.inf
    log_w = log_weights(logps, posterior.uniform_prior(2))
    assert log_w[:, 0, 1].tolist() == [-math.inf, 0]
    assert log_mixture(logps, log_w)[0].tolist() == pytest.approx([-1 - math.log(2), -1, -1])


def test_the_prior_remains_if_all_consider_the_text_impossible() -> None:
    logps = torch.full((2, 1, 3), -1.0, dtype=torch.float64)
    logps[:, 0, 0] = -math.inf
    log_w = log_weights(logps, torch.tensor([0.25, 0.75], dtype=torch.float64).log())
    assert log_w[:, 0, 2].exp().tolist() == pytest.approx([0.25, 0.75])
    assert not log_mixture(logps, log_w).isnan().any()


def test_a_token_does_not_affect_its_own_weights() -> None:
    logps = token_logps(toy_experts(2, seed=3), all_texts())
    log_w = log_weights(logps, posterior.uniform_prior(2))
    changed = logps.clone()
    changed[0, :, -1] -= 5
    assert torch.equal(log_weights(changed, posterior.uniform_prior(2)), log_w)


@given(st.integers(2, 5), st.integers(0, 100), st.integers(1, 5), st.integers(0, LENGTH + 1))
def test_speakers_keep_the_strongest_and_sum_to_one(experts: int, seed: int, k: int, prefix: int) -> None:
    logps = token_logps(toy_experts(experts, seed), all_texts())
    log_w = log_weights(logps, posterior.uniform_prior(experts))
    found = keep_strongest(log_w, k, prefix)
    assert torch.allclose(found.exp().sum(0), torch.ones(()).double())
    assert torch.equal(found[..., :prefix], log_w[..., :prefix])
    if k < experts and prefix < LENGTH:
        silent = found[..., prefix:].isneginf()
        assert (silent.sum(0) == experts - k).all()
        assert (silent == silent[..., :1]).all(), "excluded experts stay excluded"
        # The remaining experts have the weights of a mixture of them alone.
        n = 7
        chosen = (~silent[:, n, 0]).nonzero()[:, 0]
        alone = log_weights(logps[chosen, n : n + 1], posterior.uniform_prior(k))
        assert torch.allclose(found[chosen, n, prefix:], alone[:, 0, prefix:])
    else:
        assert torch.equal(found, log_w)


def test_passes_counts_all_experts_in_the_prefix_and_top_k_after_it() -> None:
    assert forward_passes_per_token(3, 128, 1, 32) == pytest.approx((3 * 32 + 96) / 128)
    assert (
        forward_passes_per_token(3, 128, 0, 32)
        == forward_passes_per_token(3, 128, 3, 32)
        == forward_passes_per_token(3, 32, 1, 32)
        == 3
    )


def test_mixing_next_token_distributions_gives_a_distribution() -> None:
    chains = toy_experts(3, seed=5)
    found = posterior.log_mixture(chains[:, 0], posterior.uniform_prior(3)[:, None])
    assert float(found.exp().sum()) == pytest.approx(1)
