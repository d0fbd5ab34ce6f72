"""Wins, ties and means over seeds and lines of descent."""

from __future__ import annotations

import math
from typing import Any

import pytest

from planaria.lab.experts.budget import LARGER, LONGER, SYNCHRONISED, ExpertPlan
from planaria.lab.experts.experts_results import ArmResult, DomainScore, Results, SeedResult


def arm(perplexities: dict[str, float]) -> ArmResult:
    scores = {
        name: DomainScore(loss=math.log(value), best=math.log(value), averaged=math.log(value), speaking=[1.0])
        for name, value in perplexities.items()
    }
    costs = dict.fromkeys(("held_out", "flops", "parameter_tokens", "inner_parameter_tokens"), 1.0)
    job = ExpertPlan(domain="law", size="M", steps=1)
    return ArmResult(experts=[job], belief=[0.0], scores=scores, fewer={}, passes={}, without={}, **costs)


def run(seed: int, line: int = 0, **arms: dict[str, float]) -> SeedResult:
    empty: dict[str, Any] = {name: {} for name in ("difficulty", "tier", "curves", "parent", "single")}
    return SeedResult(seed=seed, line=line, lost=[], arms={name: arm(found) for name, found in arms.items()}, **empty)


def results_of(*runs: SeedResult) -> Results:
    return Results(name="x", trained=["law"], untrained=["code"], runs=list(runs))


EVEN = {"law": 8.0, "code": 4.0}


@pytest.fixture
def results() -> Results:
    return results_of(
        run(1, **{SYNCHRONISED: EVEN, LONGER: {"law": 7.0, "code": 4.0}, LARGER: {"law": 7.9, "code": 4.4}}),
        run(2, **{SYNCHRONISED: EVEN, LONGER: {"law": 7.6, "code": 4.01}, LARGER: {"law": 8.4, "code": 4.2}}),
    )


def test_a_win_is_one_with_every_seed(results: Results) -> None:
    assert results.verdict(LONGER, "law") == "win"
    assert results.verdict(LONGER, "code") == "tie", "within half a percent"
    assert results.verdict(LARGER, "law") == "tie", "the seeds disagree"
    assert results.verdict(LARGER, "code") == "loss"


def test_the_geometric_mean_is_over_domains_seed_by_seed(results: Results) -> None:
    assert results.overall(LONGER) == pytest.approx([math.sqrt(7 / 8), math.sqrt(0.95 * 4.01 / 4)])
    assert results.ratios(LARGER, "code") == pytest.approx([1.1, 1.05])


def test_lines_of_a_seed_are_averaged_and_luck_is_their_deviation() -> None:
    runs = [
        run(seed, line, **{SYNCHRONISED: EVEN, LARGER: {"law": 8.0 * factor, "code": 4.0 * factor}})
        for seed, factors in ((1, (0.8, 1.25)), (2, (0.9, 0.9)))
        for line, factor in enumerate(factors)
    ]
    found = results_of(*runs)
    assert found.seeds == [1, 2]
    assert found.ratios(LARGER, "law") == pytest.approx([1.0, 0.9])
    assert found.overall(LARGER) == pytest.approx([1.0, 0.9])
    assert found.luck(LARGER) == pytest.approx([0.8, 1.25, 1.0, 1.0])


def test_a_generalist_is_no_ensemble_and_can_be_a_reference() -> None:
    found = results_of(run(1, **{SYNCHRONISED: EVEN, "generalist-M": {"law": 6.0, "code": 4.01}}))
    assert found.ensembles == [SYNCHRONISED] and found.generalists == ["generalist-M"]
    assert found.verdict(SYNCHRONISED, "law", "generalist-M") == "loss"
    assert found.verdict(SYNCHRONISED, "code", "generalist-M") == "tie"


def test_an_arm_without_results_for_one_seed_is_left_out() -> None:
    runs = (run(1, **{SYNCHRONISED: EVEN, "generalist-M": EVEN}), run(2, **{SYNCHRONISED: EVEN}))
    assert results_of(*runs).arms == [SYNCHRONISED]
