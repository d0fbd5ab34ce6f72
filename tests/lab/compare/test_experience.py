"""Experience from races: curves, their spread, and the limits of their validity."""

from __future__ import annotations

import json
import math

import pytest
from benchmarks.advice import learn, swapping
from benchmarks.harness import saved
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.lab.commands.advise import experience
from planaria.lab.compare.advice import advise, unknown_strategies, weigh_strategies
from planaria.lab.compare.experience import MAX_RATE_FACTOR, MIN_RACES, Curve, Observation, fit
from planaria.lab.compare.race_results import ComparisonResults
from planaria.models.families import parameters

RATES = [0.004, 0.01, 0.02, 0.05]
SMALL, LARGE = 342_848, 2_798_016
"""Parameters of the models of race_small and race_large."""
SHAPE = {"vocab": 1024, "dim": 64, "layers": 6, "heads": 4, "kv_heads": 2, "hidden": 176, "context": 64}


def seen(rate: float, extra: float, size: int = SMALL) -> Observation:
    return Observation(strategy="echo (8 bits)", rate=rate, extra=extra, parameters=size)


def with_spread(low: float, high: float, races: int, most: float) -> Curve:
    rest = {"scale": 1.0, "power": 0.5, "min_rate": 0.01, "min_parameters": SMALL, "max_parameters": SMALL}
    return Curve.model_validate({"low": low, "high": high, "races": races, "max_rate": most, **rest})


@given(scale=st.floats(0.1, 5.0), power=st.sampled_from([0.3, 0.5, 1.0, 1.2]))
def test_races_on_a_curve_give_that_curve_without_doubt(scale: float, power: float) -> None:
    curve = fit([seen(rate, scale * rate**power) for rate in RATES])
    assert curve.power == pytest.approx(power) and curve.scale == pytest.approx(scale)
    assert max(-curve.low, curve.high) < 1e-9 and not curve.why_rate_not_covered(0.02)


@given(st.lists(st.tuples(st.sampled_from(RATES), st.floats(-0.1, 0.3)), min_size=4, max_size=12))
def test_every_race_is_within_the_spread_of_a_curve_without_it(pairs: list[tuple[float, float]]) -> None:
    observed = [seen(*pair) for pair in pairs]
    curve = fit(observed)
    for n, one in enumerate(observed):
        alone = fit(observed[:n] + observed[n + 1 :])
        off = one.extra - alone.scale * one.rate**alone.power
        assert curve.low - 1e-12 <= off <= curve.high + 1e-12
    assert curve.low <= 0.0 <= curve.high


def test_copies_without_a_mean_cost_still_have_a_spread() -> None:
    curve = fit([seen(rate, extra) for rate, extra in zip(RATES, [-0.035, -0.009, 0.004, -0.01], strict=True)])
    assert curve.extra(0.02, "mean") == pytest.approx(0.0, abs=0.005)
    assert curve.extra(0.02, "low") <= -0.03 and curve.extra(0.02, "high") > 0.0


def test_without_failures_the_cost_is_exactly_zero() -> None:
    curve = with_spread(low=-0.04, high=0.05, races=8, most=0.05)
    assert curve.extra(0.0, "low") == curve.extra(0.0, "mean") == curve.extra(0.0, "high") == 0.0
    assert curve.extra(0.0001, "high") - curve.extra(0.0001, "mean") == pytest.approx(0.005)
    assert curve.extra(0.03, "high") - curve.extra(0.03, "mean") == pytest.approx(0.05)


def test_high_rates_and_few_races_are_doubted() -> None:
    curve = with_spread(low=0.0, high=0.0, races=MIN_RACES, most=0.04)
    assert not curve.why_rate_not_covered(MAX_RATE_FACTOR * 0.04)
    assert "0.06 failures a step, raced with up to 0.04" in curve.why_rate_not_covered(0.06)
    assert f"at least {MIN_RACES}" in curve.model_copy(update={"races": MIN_RACES - 1}).why_rate_not_covered(0.02)


def test_models_far_from_the_raced_sizes_are_doubted() -> None:
    some = [seen(rate, rate) for rate in RATES]
    both = fit([*some, *(seen(rate, rate, LARGE) for rate in RATES), seen(0.02, 0.02, 100 * LARGE)])
    assert not any(both.why_size_not_covered(size) for size in (SMALL // 2, SMALL, 1_000_000, LARGE, 2 * LARGE))
    assert both.why_size_not_covered(SMALL // 3) and both.why_size_not_covered(3 * LARGE)
    assert (
        both.why_size_not_covered(10 * LARGE)
        == "raced with 0.34 to 2.8 million parameters, and this model has 28 million"
    )
    assert both.why_size_not_covered(1000 * LARGE).endswith("this model has 2.8 billion"), (
        "one race of a size does not count"
    )
    assert "raced with 0.34 million" in fit(some).why_size_not_covered(LARGE) and not fit(
        some[:1]
    ).why_size_not_covered(SMALL)
    assert experience().swapped.why_size_not_covered(LARGE) and not experience().swapped.why_size_not_covered(SMALL)


def failing(hourly: float, **shape: int) -> RunConfig:
    flags = {"network.hourly_failure_probability": str(hourly), "train.device": "cpu", "train.precision": "fp32"}
    flags |= {f"model.{name}": str(value) for name, value in shape.items()}
    return recipe.load(shipped.find("llama_500m"), flags, "train")


def test_strategies_are_unknown_for_models_that_were_not_raced() -> None:
    small, usual = failing(0.1, **SHAPE), failing(0.1)
    assert all(one.prediction.certain for one in weigh_strategies(usual, experience()))
    ranked = {one.prediction.name: one.prediction.hours.mean for one in weigh_strategies(small, experience())}
    doubted = unknown_strategies(usual, experience())
    assert unknown_strategies(small, experience()) == {} and {*doubted} == {*ranked} - {
        one.prediction.name for one in weigh_strategies(usual, experience())
    }
    for name, one in doubted.items():
        assert "million parameters, and this model has 468 million" in one.why
        assert one.hours is not None and one.hours.mean > ranked[name] > 0, "its messages are longer"


OWN = {"recovery.strategy": "snapshot, checkpoint", "recovery.options": "{}"}


@pytest.mark.parametrize(
    ("flags", "way", "why"),
    [
        (OWN | {"routing.kind": "swapped"}, "snapshot, checkpoint", "raced with 0.34 million"),
        (
            OWN | {"routing.kind": "skipping", "routing.skip": "0.3"},
            "snapshot, checkpoint",
            "extra steps of its routes",
        ),
        (
            {"recovery.strategy": "echo, checkpoint", "recovery.options": "{ bits = 4 }"},
            "echo (4 bits)",
            "not measured",
        ),
    ],
)
def test_a_recipe_s_own_strategy_is_doubted_like_others(flags: dict[str, str], way: str, why: str) -> None:
    plain = {"train.device": "cpu", "train.precision": "fp32"}
    config = recipe.load(shipped.find("llama_500m"), plain | flags, "train")
    assert why in unknown_strategies(config, experience())[way].why
    assert way not in {one.prediction.name for one in weigh_strategies(config, experience())}


def test_no_advice_is_given_if_no_strategy_makes_progress() -> None:
    network = {"store_bandwidth": 1.0, "bandwidth": 1.0}
    usual = failing(0.1, **SHAPE)
    slow = usual.model_copy(update={"network": usual.network.model_copy(update=network)})
    with pytest.raises(UserError, match=r"^network: at a failure rate of 0.1 per worker and hour, no known strategy"):
        advise(slow, experience())
    assert {one.why for one in unknown_strategies(slow, experience()).values()} >= {
        "between failures it makes no durable progress"
    }


def test_beyond_the_raced_rates_only_exact_strategies_are_weighed() -> None:
    usual, often = failing(0.1, **SHAPE), failing(0.9, **SHAPE)
    assert "checkfree" in {one.prediction.name for one in weigh_strategies(usual, experience())}
    doubted = unknown_strategies(often, experience())
    assert {*doubted} >= {"checkfree", "checkfree_plus", "echo (2 bits)", "echo (8 bits)"}
    assert all(one.hours is None for one in doubted.values())
    rest = weigh_strategies(often, experience())
    assert rest and all(one.prediction.certain for one in rest)
    assert all(math.isfinite(one.prediction.hours.mean) for one in rest)


@pytest.mark.parametrize("name", ["recovery", "race_small", "race_large", "race_gpu"])
def test_shipped_experience_is_that_of_the_saved_comparison(name: str) -> None:
    found = ComparisonResults.model_validate_json(json.dumps(saved(name)))
    shipped_too = [seen for source, seen in experience().observed.items() if source.startswith(f"{name}, ")]
    model = recipe.load(shipped.find(name), {"train.device": "cpu"}).model
    assert [learn(found, name, parameters(model, found.stages))] == shipped_too
    if name == "recovery":
        assert swapping(found, name, SMALL) == experience().swapped
