"""Equal compute of arms, and its accounting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.lab.experts.budget import (
    LARGER,
    LONGER,
    SYNCHRONISED,
    ExpertPlan,
    allot_jobs,
    arm_cost,
    arm_costs,
    generalist,
    is_generalist,
)
from planaria.lab.experts.lineage import assign_tiers
from planaria.models.llama_stages import flops_per_token

SIZES = {
    size: ModelConfig(vocab=257, dim=64, layers=2, hidden=width)
    for size, width in zip("SML", (128, 256, 384), strict=True)
}
STEPS = [150, 200, 250]


def test_the_arms_of_three_domains() -> None:
    arms = allot_jobs({"easy": 0, "middle": 1, "hard": 2}, list(SIZES), STEPS)
    assert [job.name for job in arms[SYNCHRONISED]] == ["easy-M-200", "middle-M-200", "hard-M-200"]
    assert [job.name for job in arms[LONGER]] == ["easy-M-150", "middle-M-200", "hard-M-250"]
    assert [job.name for job in arms[LARGER]] == ["easy-S-200", "middle-M-200", "hard-L-200"]


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.floats(0, 9), min_size=1, max_size=9))
def test_symmetric_budgets_cost_the_same_for_any_difficulties(difficulty: dict[str, float]) -> None:
    arms = allot_jobs(assign_tiers(difficulty, 3), list(SIZES), STEPS)
    found = arm_costs(arms, SIZES, 2048).values()
    assert len({round(bill.parameter_tokens) for bill in found}) == 1
    assert len({round(bill.inner_parameter_tokens) for bill in found}) == 1


def test_arms_of_unequal_cost_are_rejected() -> None:
    arms = allot_jobs({"easy": 0, "hard": 2, "middle": 1}, list(SIZES), [150, 200, 400])
    with pytest.raises(UserError, match=r"M_Ho-I_He would take .* more compute"):
        arm_costs(arms, SIZES, 2048)


@given(st.integers(1, 9), st.integers(1, 400), st.sampled_from(sorted(SIZES)))
def test_a_generalist_gets_the_compute_of_all_experts_in_whole_steps(domains: int, steps: int, size: str) -> None:
    even = [ExpertPlan(domain=str(n), size="M", steps=steps) for n in range(domains)]
    flops = arm_cost(even, SIZES, 2048).flops
    arm, job = generalist(size, flops, SIZES[size], 2048)
    found = arm_cost([job], SIZES, 2048)
    assert is_generalist(arm) and not is_generalist(LARGER)
    if size == "M":
        assert job.steps == domains * steps and found.flops == pytest.approx(flops)
    if job.steps > 1:
        assert 0 <= flops * (1 + 1e-9) - found.flops < found.flops / job.steps


def test_a_generalist_of_another_size_may_differ_in_cost() -> None:
    even = {SYNCHRONISED: [ExpertPlan(domain="law", size="M", steps=10)]}
    arm, job = generalist("L", arm_cost(even[SYNCHRONISED], SIZES, 100).flops, SIZES["L"], 100)
    assert job.steps < 10 and arm_costs({**even, arm: [job]}, SIZES, 100)[arm].flops > 0


def test_inactive_experts_count_for_training_but_not_for_inference() -> None:
    jobs = [ExpertPlan(domain=domain, size="M", steps=10) for domain in ("first", "second")]
    all_, last = arm_cost(jobs, SIZES, 100), arm_cost(jobs, SIZES, 100, ["second"])
    assert last.flops == all_.flops
    assert all_.token_flops == 2 * last.token_flops == pytest.approx(2 * flops_per_token(SIZES["M"]) / 3)
