"""Wins for each arm, ties apart."""

from __future__ import annotations

import math

import pytest

from planaria.lab.experts.budget import LARGER, LONGER, SYNCHRONISED, Job
from planaria.lab.experts.experts_results import ArmResult, Results, Score, SeedResult


def arm(perplexities: dict[str, float]) -> ArmResult:
    scores = {
        name: Score(loss=math.log(value), best=math.log(value), averaged=math.log(value), speaking=[1.0])
        for name, value in perplexities.items()
    }
    return ArmResult(
        experts=[Job(domain="law", size="M", steps=1)],
        belief=[0.0],
        scores=scores,
        held_out=0.0,
        fewer={},
        passes={},
        without={},
        flops=1.0,
        parameter_tokens=1.0,
        inner_parameter_tokens=1.0,
    )


def run(seed: int, line: int = 0, **arms: dict[str, float]) -> SeedResult:
    return SeedResult(
        seed=seed,
        line=line,
        difficulty={},
        tier={},
        curves={},
        parent={},
        single={},
        lost=[],
        arms={name: arm(found) for name, found in arms.items()},
    )


@pytest.fixture
def results() -> Results:
    even = {"law": 8.0, "code": 4.0}
    runs = [
        run(1, **{SYNCHRONISED: even, LONGER: {"law": 7.0, "code": 4.0}, LARGER: {"law": 7.9, "code": 4.4}}),
        run(2, **{SYNCHRONISED: even, LONGER: {"law": 7.6, "code": 4.01}, LARGER: {"law": 8.4, "code": 4.2}}),
    ]
    return Results(name="x", trained=["law"], untrained=["code"], runs=runs)


def test_a_win_is_one_in_every_seed_and_ties_are_apart(results: Results) -> None:
    assert results.verdict(LONGER, "law") == "win"
    assert results.verdict(LONGER, "code") == "tie", "within half a percent"
    assert results.verdict(LARGER, "law") == "tie", "the seeds disagree"
    assert results.verdict(LARGER, "code") == "loss"


def test_one_seed_that_is_exactly_even_makes_a_tie_of_the_others_wins_and_losses() -> None:
    even = {"law": 8.0, "code": 4.0}
    unlike = [{"law": 8.0, "code": 4.0}, {"law": 6.0, "code": 5.0}]
    found = Results(
        name="x",
        trained=["law"],
        untrained=["code"],
        runs=[run(seed, **{SYNCHRONISED: even, LONGER: other}) for seed, other in enumerate(unlike)],
    )
    assert [found.verdict(LONGER, domain) for domain in found.domains] == ["tie", "tie"]


def test_the_geometric_mean_is_over_domains_seed_by_seed(results: Results) -> None:
    assert results.overall(LONGER) == pytest.approx([math.sqrt(7 / 8), math.sqrt(0.95 * 4.01 / 4)])
    assert results.ratios(LARGER, "code") == pytest.approx([1.1, 1.05])


def test_lines_of_a_seed_are_averaged_and_the_luck_of_a_parent_is_what_they_differ_by() -> None:
    even = {"law": 8.0, "code": 4.0}
    runs = [
        run(seed, line, **{SYNCHRONISED: even, LARGER: {"law": 8.0 * factor, "code": 4.0 * factor}})
        for seed, factors in ((1, (0.8, 1.25)), (2, (0.9, 0.9)))
        for line, factor in enumerate(factors)
    ]
    found = Results(name="x", trained=["law"], untrained=["code"], runs=runs)
    assert found.seeds == [1, 2]
    assert found.ratios(LARGER, "law") == pytest.approx([1.0, 0.9])
    assert found.overall(LARGER) == pytest.approx([1.0, 0.9])
    assert found.luck(LARGER) == pytest.approx([0.8, 1.25, 1.0, 1.0])


def test_a_generalist_is_no_ensemble_and_any_arm_can_be_held_against_it() -> None:
    arms = {SYNCHRONISED: {"law": 8.0, "code": 4.0}, "generalist-M": {"law": 6.0, "code": 4.01}}
    found = Results(name="x", trained=["law"], untrained=["code"], runs=[run(1, **arms)])
    assert found.ensembles == [SYNCHRONISED] and found.generalists == ["generalist-M"]
    assert found.verdict(SYNCHRONISED, "law", "generalist-M") == "loss"
    assert found.verdict(SYNCHRONISED, "code", "generalist-M") == "tie"


def test_an_arm_that_was_lost_with_one_seed_is_left_out() -> None:
    even = {"law": 8.0, "code": 4.0}
    runs = [run(1, **{SYNCHRONISED: even, "generalist-M": even}), run(2, **{SYNCHRONISED: even})]
    assert Results(name="x", trained=["law"], untrained=["code"], runs=runs).arms == [SYNCHRONISED]
