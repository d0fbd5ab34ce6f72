"""Lower bounds on a plan's step, and its chart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.schema import NetworkConfig
from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import UNIT, Costs
from planaria.pipeline.plan.actions import StepPlan
from planaria.pipeline.plan.build import plan_routes
from planaria.pipeline.plan.plan_bound import lower_bound
from planaria.pipeline.plan.simulation import draw
from planaria.runtime.prediction.simulate import simulate
from support.random_plans import costs, plans

both = MessageBytes.both


def straight(stages: int, microbatches: int, order: str = "gpipe", in_flight: int | None = None) -> StepPlan:
    return plan_routes([(0, *range(1, stages + 1), 0)] * microbatches, order, in_flight or microbatches)


def free_ends(stages: int, f: float, b: float) -> Costs:
    return Costs(NetworkConfig(forward_s=[0.0] + [f] * stages, backward_s=[0.0] + [b] * stages))


@given(plans(), costs(), st.integers(0, 3))
def test_no_execution_beats_the_bound(plan: StepPlan, prices: Costs, message_bytes: int) -> None:
    assert simulate(plan, prices, both(message_bytes)).step_s >= lower_bound(plan, prices, both(message_bytes)).step_s


@pytest.mark.parametrize(("stages", "microbatches", "f", "b"), [(1, 1, 1.0, 2.0), (4, 8, 1.0, 2.0), (7, 3, 0.3, 0.7)])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_straight_pipeline_reaches_the_textbook_time(
    stages: int, microbatches: int, f: float, b: float, order: str
) -> None:
    plan, prices = straight(stages, microbatches, order), free_ends(stages, f, b)
    textbook = pytest.approx((microbatches + stages - 1) * (f + b))
    assert lower_bound(plan, prices, both(0)).step_s == textbook
    assert simulate(plan, prices, both(0)).step_s == textbook


def test_the_limiting_part_is_named() -> None:
    prices = free_ends(4, 1.0, 2.0)
    assert lower_bound(straight(4, 1), prices, both(0)).binds == "microbatch 0"
    assert lower_bound(straight(4, 8), prices, both(0)).binds == "stage 4"
    # Sequentially, each takes the whole route: 8 · 4 · (1 + 2).
    narrow = lower_bound(straight(4, 8, "1f1b", in_flight=1), prices, both(0))
    assert (narrow.step_s, narrow.binds) == (96.0, "chain of microbatches (in_flight = 1)")
    # Eight messages of 10 s, then 9 more messages and 12 s of computation for the last microbatch: 80 + 9 · 10 + 12.
    slow = lower_bound(straight(4, 8), Costs(prices.network.model_copy(update={"bandwidth": 0.1})), both(1))
    assert (slow.step_s, slow.binds) == (182.0, "link 0→1")


def test_the_free_embedding_is_not_busy_time_of_stage_0() -> None:
    """The head starts at 4 with the first microbatch, takes 8 · 3, and 4 · 2 follow."""
    bound = lower_bound(straight(4, 8), UNIT, both(0))
    assert (bound.step_s, bound.binds) == (36.0, "stage 0")
    assert simulate(straight(4, 8), UNIT, both(0)).step_s == 36.0


def test_an_evaluation_has_a_bound_too() -> None:
    plan = plan_routes([(0, 1, 2, 0)] * 3, "1f1b", 3, backward=False)
    assert lower_bound(plan, free_ends(2, 1.0, 9.0), both(0)).step_s == 4.0


def test_the_chart_of_two_stages_and_two_microbatches() -> None:
    plan = plan_routes([(0, 1, 2, 0)] * 2, "gpipe", 2)
    costs = Costs(NetworkConfig(forward_s=[0.0, 1.0, 1.0], backward_s=[0.0, 2.0, 2.0]))
    drawn = draw(simulate(plan, costs, both(0)), lower_bound(plan, costs, both(0)), width=9 + 27)
    assert drawn.splitlines() == [
        "stage 0 |...........................",
        "stage 1 |F0-F1-.........B0====B1====",
        "stage 2 |...F0-F1-B0====B1====......",
        "step 9 s, bound 9 s (stage 2), bubble 33.3%; F forward, B backward, . idle",
    ]


def test_rows_have_the_requested_width() -> None:
    plan = plan_routes([(0, *range(1, 11), 0)] * 12, "1f1b", 11)
    for width in (5, 40, 133):
        *rows, _ = draw(simulate(plan, UNIT, both(0)), lower_bound(plan, UNIT, both(0)), width).splitlines()
        assert len(rows) == 11
        assert {len(row) for row in rows} == {max(width, len("stage 10 |") + 1)}


def test_a_step_without_duration_can_be_drawn() -> None:
    plan, free = plan_routes([(0, 1, 0)], "1f1b", 1), Costs(NetworkConfig())
    assert "step 0 s, bound 0 s" in draw(simulate(plan, free, both(0)), lower_bound(plan, free, both(0)))
