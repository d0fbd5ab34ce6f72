"""Validation of the ``[experts]`` table; tests/cli/test_experts_command.py covers whole recipes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from planaria.config.schema import ModelConfig, RunConfig
from planaria.lab.experts.campaign import planned_models
from planaria.lab.experts.experts_spec import ExpertsSpec, MixtureSpec

TWO = {"law": {"source": "law.txt"}, "talk": {"source": "talk.txt"}}

ONE = {"sizes": {"M": 8}, "steps": [4]}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"domains": {"law": TWO["law"]}}, "set at least two"),
        ({"domains": TWO, "clusters": 3}, "set exactly one domain"),
        ({"domains": TWO, "sizes": {"S": 3, "L": 2, "M": 4}}, "list the smallest first"),
        ({"domains": {}, "clusters": 3}, "set exactly one domain"),
        ({"domains": TWO}, "3 sizes for 2 domains leave the outer tiers empty, and all arms equal; use at most 1"),
        ({"domains": TWO, "seeds": [], "sizes": {"M": 8}, "steps": [4]}, "use one or more distinct seeds"),
        (
            {"domains": TWO, "sizes": {"0.1M": 8}, "steps": [4]},
            "experts.sizes.0.1M: not a valid name; use 1 to 64 letters",
        ),
        ({"domains": TWO, "sizes": {"M": 8}, "steps": [4], "probe": {"by": ["sizes"]}}, "experts.sizes has only one"),
        (
            {"domains": {"law": TWO["law"]}, "clusters": 100, "mixture": {"prior": "worst"}},
            "so 100 experts leave no choice",
        ),
        ({"domains": TWO, "mixture": {"top_k": 3}, **ONE}, "experts.mixture.top_k = 3 is more than the 2 experts"),
        ({"domains": {**TWO, "../law": TWO["law"]}}, "not a valid name"),
        ({"domains": {**TWO, "größe": TWO["law"]}, **ONE}, "not a valid name"),
        ({"domains": {**TWO, "generalist": TWO["law"]}, **ONE}, "is the name of an arm"),
        ({"domains": {**TWO, "mix": {}}, **ONE}, "experts.domains.mix: set source, or of \\(the domains"),
        ({"domains": {**TWO, "mix": {"of": ["law", "tlak"]}}, **ONE}, "'tlak' is not a domain with text; did you mean"),
        ({"domains": {**TWO, "more": {"source": "x", "after": "low"}}, **ONE}, "after = 'low': no such domain"),
        ({"domains": TWO, "untrained": {"x": {"source": "x", "after": "law"}}, **ONE}, "x.after: requires an expert"),
        ({"domains": TWO, "untrained": {"x": {"of": ["law"]}}, **ONE}, "x.of: requires an expert"),
        ({"domains": {**TWO, "x": {"source": "x", "begins": "("}}, **ONE}, "not a regular expression"),
        ({"domains": TWO, "generalists": ["XL"], **ONE}, "experts.generalists: there is no size 'XL'"),
        ({"domains": TWO, "schedule_steps": 3, **ONE}, "schedule_steps = 3 is less than the longest"),
        ({"domains": TWO, "seed": {"text": {"field": "x"}}, **ONE}, "experts.seed.text.source is missing"),
    ],
)
def test_invalid_tables_are_rejected(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ExpertsSpec.model_validate(given)


def test_the_texts_of_domains_and_the_active_experts() -> None:
    domains = {**TWO, "mix": {"of": ["law", "talk"]}, "more": {"source": "more.txt", "after": "law"}}
    found = ExpertsSpec.model_validate({"domains": domains, **ONE})
    assert found.speaking == ["more", "talk", "mix"]
    assert found.parts("mix") == ["law", "talk"] and found.parts("law") == ["law"]
    assert found.parts("generalist") == ["law", "talk", "more"], "no text twice"
    assert found.rivals == ["M"]


@pytest.mark.parametrize(
    ("given", "described"),
    [
        ({}, "prior = uniform, top_k = 0 (all experts)"),
        (
            {"prior": "cached", "top_k": 1, "prefix": 8},
            "prior = cached, decay = 0.3, sequences = 100, top_k = 1, prefix = 8",
        ),
        ({"prior": "worst"}, "prior = worst, top_k = 0 (all experts), prefix = 32"),
        (
            {"prior": "votes", "votes": {"padding": True}, "top_k": 1, "prefix": 0},
            "prior = votes, votes.by = votes, votes.padding = true, temperature = 0.1, top_k = 1, prefix = 0",
        ),
    ],
)
def test_a_mixture_is_described_by_the_options_that_apply_to_it(given: dict[str, Any], described: str) -> None:
    assert MixtureSpec.model_validate(given).describe() == described


def test_planned_models_are_counted_by_size() -> None:
    domains = {**TWO, "code": {"source": "stdlib"}}
    spec = ExpertsSpec.model_validate(
        {"domains": domains, "sizes": {"S": 8, "M": 16, "L": 24}, "steps": [4, 6, 8], "seed": {"steps": 10}}
    )
    shape = ModelConfig(vocab=257, dim=16, layers=4, heads=2, context=32)
    planned = planned_models(spec, RunConfig(model=shape))
    assert planned["S"] == planned["L"] == [10, 6]
    assert sorted(planned["M"]) == [4, 6, 6, 6, 8, 10, 18, 80, 80, 80], "experts, parent, generalist and probes"
