"""Scores of an arm from its experts' log-probabilities: quality, routing and compute of the recipe's mixture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planaria.lab.experts.budget import ArmCost, ExpertPlan
from planaria.lab.experts.experts_results import ArmResult
from planaria.lab.experts.experts_spec import ExpertsSpec, MixtureSpec
from planaria.lab.experts.log_probabilities import DomainLogProbabilities
from planaria.lab.experts.scoring import arm_result, score

DOMAINS = ("law", "talk", "code")
TEXTS, TOKENS = 8, 12
JOBS = [ExpertPlan(domain=name, size="M", steps=4) for name in DOMAINS]
COST = ArmCost(flops=6.0, parameter_tokens=3.0, inner_parameter_tokens=2.0, token_flops=300.0)


def readings() -> dict[str, DomainLogProbabilities]:
    """Return readings of one expert for each domain, which is best on its own, and of an untrained domain."""
    draw = torch.Generator().manual_seed(0)
    return {
        job.name: DomainLogProbabilities(
            {
                f"{split}.{name}": -torch.rand(TEXTS, TOKENS, generator=draw) - (0.5 if name == job.domain else 1.5)
                for split, names in (("test", (*DOMAINS, "news")), ("held_out", DOMAINS))
                for name in names
            }
        )
        for job in JOBS
    }


def priors(named: int) -> dict[str, torch.Tensor]:
    """Return a text prior that prefers the own expert on ``named`` of the texts, and the last one on the others."""
    found = {}
    for split in ("test", "held_out"):
        for number, name in enumerate((*DOMAINS, "news")):
            likely = torch.zeros(len(DOMAINS), TEXTS, TOKENS, dtype=torch.float64)
            likely[number % len(DOMAINS), :named] = likely[-1, named:] = 2.0
            found[f"{split}.{name}"] = likely.log_softmax(0)
    return found


def scored(named: int = 6, jobs: list[ExpertPlan] = JOBS, **mixture: Any) -> ArmResult:
    domains = {name: {"source": f"{name}.txt"} for name in DOMAINS}
    tables = {"domains": domains, "sizes": {"M": 8}, "steps": [4], "mixture": mixture}
    text_priors = priors(named) if mixture.get("prior") == "votes" else {}
    return arm_result(jobs, COST, readings(), ExpertsSpec.model_validate(tables), text_priors)


def test_fewer_experts_are_compared_with_all_whatever_the_mixture_selects() -> None:
    whole, routed = scored(prior="votes", prefix=0), scored(prior="votes", top_k=1, prefix=0)
    assert whole.all_experts == whole.scores == routed.all_experts
    assert whole.fewer == routed.fewer
    assert routed.scores == routed.fewer["top-1"] != routed.all_experts


@pytest.mark.parametrize(
    ("top_k", "prefix", "passes"), [(0, 0, 3), (1, 0, 1), (2, 0, 2), (1, 6, 2), (3, 0, 3), (1, TOKENS, 3)]
)
def test_compute_per_token_is_that_of_the_active_experts(top_k: int, prefix: int, passes: float) -> None:
    found = scored(top_k=top_k, prefix=prefix)
    assert found.token_flops == pytest.approx(100.0 * passes)
    assert found.flops == COST.flops, "training is the same"


def test_one_model_costs_one_pass() -> None:
    alone = scored(jobs=JOBS[:1], top_k=1, prefix=0)
    assert alone.token_flops == COST.token_flops and alone.all_experts == alone.scores


def test_routing_is_the_share_of_texts_led_by_their_own_expert() -> None:
    found = scored(prior="votes", top_k=1, prefix=0)
    assert [found.scores[name].routed for name in DOMAINS] == [0.75, 0.75, 1.0]
    assert [found.scores[name].routed_by_prior for name in DOMAINS] == [0.75, 0.75, 1.0]
    assert found.scores["news"].routed is None, "no expert of its own"
    likelihoods = scored(named=0, prior="votes").scores["law"]
    assert (likelihoods.routed, likelihoods.routed_by_prior) == (1.0, 0.0), "the posterior corrects the prior"
    fixed = scored(prior="uniform").scores["law"]
    assert (fixed.routed, fixed.routed_by_prior) == (1.0, None), "a prior that is the same for all texts routes none"


def test_a_score_without_a_known_domain_has_no_routing() -> None:
    assert score(torch.zeros(2, 1, 3), torch.zeros(2, 1, 3), MixtureSpec()).routed is None
