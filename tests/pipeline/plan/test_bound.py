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


def test_a_slow_stage_binds() -> None:
    prices = Costs(NetworkConfig(forward_s=[0.0, 1.0, 5.0, 1.0], backward_s=[0.0, 1.0, 5.0, 1.0]))
    bound = lower_bound(straight(3, 6), prices, both(0))
    # Starts at 1; twelve passes of 5; then stage 1's last backward.
    assert (bound.step_s, bound.binds) == (62.0, "stage 2")


def test_the_free_embedding_is_not_busy_time_of_stage_0() -> None:
    """The head starts at 4 with the first microbatch, takes 8 · 3, and 4 · 2 follow."""
    bound = lower_bound(straight(4, 8), UNIT, both(0))
    assert (bound.step_s, bound.binds) == (36.0, "stage 0")
    assert simulate(straight(4, 8), UNIT, both(0)).step_s == 36.0


def test_an_evaluation_has_a_bound_too() -> None:
    plan = plan_routes([(0, 1, 2, 0)] * 3, "1f1b", 3, backward=False)
    assert lower_bound(plan, free_ends(2, 1.0, 9.0), both(0)).step_s == 4.0
