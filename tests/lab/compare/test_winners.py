from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.schema import RunConfig
from planaria.lab.compare.advice import candidates
from planaria.lab.compare.race_results import ArmScore, ComparisonResults
from planaria.lab.report.winner_figure import fault_free_ratio, hours_at, hours_of_arms, winning_arms
from planaria.runtime.prediction.copy_costs import costs_of_copies
from planaria.runtime.resolved_run import ResolvedRun
from support.report.plain_arms import arm_run, arm_score, results

STEP_S = 36.0
TICKS = 100.0
"""Steps of the fault-free arm to the target: one hour."""


def arm(
    name: str,
    ratio: float | None = 1.0,
    down: float = 0.0,
    step_s: float = STEP_S,
    routing: str = "full",
    faults: bool = True,
    saves: int = 0,
    save_s: float = 0.0,
) -> ArmScore:
    """Return an arm with one seed, ``ratio`` × TICKS steps to the target, and ``down`` more hours."""
    ticks = None if ratio is None else ratio * TICKS
    hours = None if ticks is None else ticks * step_s / 3600 + down
    run = arm_run(hours, ratio, ticks, saves=saves, failures=5 if faults else 0)
    return arm_score(name, run, faults=faults, routing=routing, step_s=step_s, save_s=save_s)


def compared(*arms: ArmScore) -> ComparisonResults:
    return results(arm("fault-free", faults=False), *arms)


def test_at_the_raced_rate_the_hours_are_those_of_the_race() -> None:
    struck = arm("a", ratio=1.3, down=0.25)
    assert hours_at(compared(struck), struck, 0.1) == pytest.approx(1.55)


def test_losses_grow_linearly_from_zero_without_failures() -> None:
    struck = arm("a", ratio=1.3, down=0.25)
    found = compared(struck)
    assert hours_at(found, struck, 0.0) == pytest.approx(1.0)
    # 0.9 is the survival at twice a rate of 5.13 %, and 0.81 at twice 10 %: half as many failures, and twice as many.
    assert hours_at(found, struck, 1 - 0.9**0.5) == pytest.approx(1.0 + 0.15 + 0.125)
    assert hours_at(found, struck, 0.19) == pytest.approx(1.0 + 0.6 + 0.5)


def test_uploads_cost_the_same_at_every_rate() -> None:
    found = compared(saving := arm("saving", ratio=1.0, down=0.5, saves=3, save_s=600.0))
    assert hours_at(found, saving, 0.1) == pytest.approx(1.5)
    assert hours_at(found, saving, 0.0) == pytest.approx(1.5)


def test_the_cost_of_routing_remains_without_failures() -> None:
    struck = arm("plus", ratio=1.3, routing="swapped")
    spared = arm("swapped", ratio=1.1, routing="swapped", faults=False)
    assert fault_free_ratio(compared(struck), struck) == 1.0, "unknown without a fault-free arm"
    found = compared(spared, struck)
    assert fault_free_ratio(found, struck) == 1.1
    assert hours_at(found, struck, 0.0) == pytest.approx(1.1)
    assert hours_at(found, struck, 0.19) == pytest.approx(1.5)


def test_another_step_time_scales_only_steps() -> None:
    twin = arm("twin", ratio=1.0, down=0.5, step_s=2 * STEP_S)
    found = compared(twin)
    assert hours_at(found, twin, 0.1) == pytest.approx(2.5)
    assert hours_at(found, twin, 0.1, STEP_S) == pytest.approx(1.5)


def test_an_arm_that_missed_the_target_never_wins() -> None:
    lost, slow = arm("lost", ratio=None), arm("slow", ratio=1.9)
    found = compared(lost, slow)
    assert hours_at(found, lost, 0.1) is None
    assert winning_arms(hours_of_arms(found, [0.01, 0.5], [1.0, 2.0], None)) == [["slow", "slow"], ["slow", "slow"]]
    assert winning_arms(hours_of_arms(compared(lost), [0.1], [1.0], None)) == []


def test_arms_without_failures_never_win() -> None:
    found = compared(arm("spared", faults=False), arm("a", ratio=1.5))
    assert winning_arms(hours_of_arms(found, [0.1], [1.0], None)) == [["a"]]


def test_redundancy_wins_if_it_is_cheap_and_failures_are_frequent() -> None:
    found = compared(arm("rebuilt", ratio=1.4), arm("twin", step_s=1.6 * STEP_S))
    # rebuilt: 1.08, 1.40 and 1.85 hours; twin: cost hours.
    assert winning_arms(hours_of_arms(found, [0.02, 0.1, 0.2], [1.1, 1.3, 1.7], "twin")) == [
        ["rebuilt", "twin", "twin"],
        ["rebuilt", "twin", "twin"],
        ["rebuilt", "rebuilt", "twin"],
    ]
    assert winning_arms(hours_of_arms(found, [0.02, 0.1, 0.2], [1.1], None)) == [["rebuilt", "rebuilt", "twin"]], (
        "its own step time"
    )


@given(st.floats(1.0, 2.0), st.floats(0.0, 2.0), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_more_failures_never_help(ratio: float, down: float, one: float, other: float) -> None:
    struck = arm("a", ratio, down)
    few, many = (hours_at(compared(struck), struck, rate) or 0.0 for rate in sorted((one, other)))
    assert few <= many + 1e-9


@given(st.floats(1.0, 2.0), st.floats(1.0, 2.0), st.floats(0.01, 0.5), st.lists(st.floats(1.0, 2.0), min_size=2))
def test_redundancy_does_not_win_again_at_a_higher_cost(a: float, b: float, rate: float, costs: list[float]) -> None:
    found = compared(arm("a", a), arm("twin", b))
    column = [row[0] for row in winning_arms(hours_of_arms(found, [rate], sorted(costs), "twin"))]
    assert "twin" not in column[column.index("a") :] if "a" in column else True


def test_only_redundancy_declares_that_workers_compute_copies() -> None:
    variants = candidates(RunConfig())
    costs = {name: costs_of_copies(ResolvedRun(variant)) for name, variant in variants.items()}
    assert {name for name, copies in costs.items() if any(cost.forward for _, cost in copies)} == {"redundant"}
