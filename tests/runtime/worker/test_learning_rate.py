"""Learning-rate schedules, also across resumptions."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.schema import OptimConfig, RunConfig
from planaria.runtime.preparation.resumption import rate_change
from planaria.runtime.worker.learning_rate import learning_rate


def test_warm_up_is_linear_and_cosine_ends_at_its_fraction() -> None:
    config = OptimConfig(lr=1.0, warmup=4)
    assert [learning_rate(config, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    config = OptimConfig(lr=2.0, warmup=10, schedule="cosine", final_lr=0.1)
    assert learning_rate(config, 10, 110) == 2.0
    assert [learning_rate(config, step, 110) for step in (60, 110)] == pytest.approx([2.0 * 0.55, 0.2])


def test_wsd_is_constant_until_its_linear_decay() -> None:
    config = OptimConfig(lr=2.0, warmup=10, schedule="wsd", decay=0.2, final_lr=0.1)
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)]) and set(rates[10:81]) == {2.0}
    assert rates[90] == pytest.approx(1.1) and rates[100] == pytest.approx(0.2)
    longer = [learning_rate(config, step, 150) for step in range(101)]
    assert longer[:81] == rates[:81], "steps that are given later change nothing before the decay"


@given(st.integers(0, 50), st.integers(1, 200), st.sampled_from(["constant", "cosine", "wsd"]))
def test_the_rate_stays_between_zero_and_the_peak(warmup: int, steps: int, schedule: str) -> None:
    config = OptimConfig.model_validate({"lr": 0.3, "warmup": warmup, "schedule": schedule})
    rates = [learning_rate(config, step, steps) for step in range(steps)]
    assert all(0 < rate <= 0.3 and math.isfinite(rate) for rate in rates)
    after = rates[warmup:]
    assert after == sorted(after, reverse=True)


COSINE, WSD = {"lr": 0.01, "schedule": "cosine"}, {"lr": 0.01, "schedule": "wsd"}


def run(steps: int, optim: dict[str, Any], schedule_steps: int = 0) -> RunConfig:
    train = {"steps": steps, "schedule_steps": schedule_steps}
    return RunConfig.model_validate({"optim": optim, "train": train})


@pytest.mark.parametrize(
    ("before", "after", "step", "complaint"),
    [
        (run(10, COSINE), run(20, COSINE), 10, "step 10 is 0.0055, and was 0.001 .*constant --optim.lr 0.001 holds"),
        (run(10, COSINE), run(8, COSINE), 4, "is 0.0055, and was 0.006891 .*--train.schedule_steps 10 keeps that"),
        (run(10, COSINE), run(20, COSINE, 40), 5, "step 5 is 0.009657, and was 0.0055 "),
        (run(10, WSD), run(20, WSD), 9, "step 9 is 0.01, and was 0.0055 "),
        (run(10, COSINE), run(10, {**COSINE, "warmup": 8}), 3, "step 3 is 0.005, and was .*leave optim unchanged"),
        (run(10, COSINE), run(10, {**COSINE, "final_lr": 0.5}), 5, "step 5 is 0.0075, and was 0.0055 .*leave optim"),
        (run(10, WSD), run(10, {**WSD, "decay": 0.9}), 6, "step 6 is 0.005, and was 0.01 .*leave optim"),
        (run(10, COSINE), run(10, {**COSINE, "lr": 0.02}), 5, "step 5 is 0.011, and was 0.0055 .*leave optim"),
    ],
)  # fmt: skip
def test_a_resumed_run_reports_a_jump_of_its_rate(
    before: RunConfig, after: RunConfig, step: int, complaint: str
) -> None:
    found = rate_change(before, after, step)
    assert re.search(complaint, found) and "\n" not in found


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [
        (run(10, COSINE), run(10, COSINE), 5), (run(10, COSINE), run(20, COSINE), 0),
        (run(10, {"lr": 0.01}), run(20, {"lr": 0.01}), 10), (run(10, WSD), run(20, WSD), 8),
        (run(10, COSINE, 40), run(20, COSINE, 40), 10), (run(10, COSINE), run(8, COSINE, 10), 4),
        (run(10, COSINE), run(8, COSINE), 8),
    ],
)  # fmt: skip
def test_a_resumed_run_without_a_jump_reports_nothing(before: RunConfig, after: RunConfig, step: int) -> None:
    """Nor does one with no step done yet, or none left."""
    assert rate_change(before, after, step) == ""
