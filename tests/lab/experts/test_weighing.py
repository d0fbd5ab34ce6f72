"""Weights for an ensemble's worst domain, and the prior that uses them."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from planaria.lab.experts import posterior
from planaria.lab.experts.experts_results import WORST, FittedWeights
from planaria.lab.experts.experts_spec import MixtureSpec
from planaria.lab.experts.scoring import belief, fit_weights
from planaria.lab.report.worst_report import section, sentences

TOKENS = 12


def read(seed: int, texts: int = 40) -> dict[str, Tensor]:
    """Return log-probabilities of three experts, each better on its domain, with "c" harder for all."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for number, name in enumerate("abc"):
        logps = -torch.rand(3, texts, TOKENS, generator=draw, dtype=torch.float64) - (1.5 if name == "c" else 0.5)
        logps[number] += 0.3
        found[name] = logps
    return found


def weighed(tokens: int) -> FittedWeights:
    return fit_weights(["A", "B", "C"], read(0), read(1), MixtureSpec(), tokens)


@pytest.mark.parametrize("tokens", [1, 4, TOKENS])
def test_losses_are_those_of_the_mixture_on_the_first_tokens_and_gains_are_bounded(tokens: int) -> None:
    found = weighed(tokens)
    log_prior = torch.tensor(found.weights, dtype=torch.float64).log()
    for texts, losses in ((read(0), found.held_out[WORST]), (read(1), found.test[WORST])):
        for name, logps in texts.items():
            first = logps[..., :tokens]
            mixed = posterior.log_mixture(first, posterior.log_weights(first, log_prior))
            assert losses[name] == pytest.approx(-float(mixed.mean()))
    assert found.value == pytest.approx(max(found.held_out[WORST].values()))
    assert found.worst(WORST) == "c" and found.value <= max(found.held_out["uniform"].values()) + 1e-9
    assert found.most == pytest.approx(math.log(3) / tokens)
    assert max(found.held_out["uniform"].values()) - found.value <= found.most
    assert min(found.costs.values()) >= -found.most


def test_the_report_contains_the_numbers() -> None:
    found = weighed(4)
    text = " ".join(sentences(found))
    for piece in (f"{found.value:.4f}", "ln 3 / 4", f"a {found.costs['a']:+.3f}", "c's price is"):
        assert piece in text
    assert "not certified" not in text
    assert "not certified to 1e-09" in sentences(found.model_copy(update={"certified": False, "tolerance": 1e-9}))[0]
    assert "The worst domain" in section(found)


def test_tokens_are_limited_by_the_texts() -> None:
    assert weighed(100).tokens == TOKENS


def test_the_worst_prior_is_fitted_on_the_prefix() -> None:
    log_prior = belief(MixtureSpec(prior="worst", prefix=4), read(0))
    assert log_prior.exp().tolist() == pytest.approx(weighed(4).weights)
    assert belief(MixtureSpec(prior="worst", prefix=4), {k: v[:1] for k, v in read(0).items()}).tolist() == [0.0]
    with pytest.raises(ValidationError, match=r"mixture\.prefix = 0: prior = 'worst'"):
        MixtureSpec(prior="worst", prefix=0)
