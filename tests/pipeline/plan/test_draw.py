from __future__ import annotations

from planaria.config.schema import NetworkConfig
from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import UNIT, Costs
from planaria.pipeline.plan.build import plan_routes
from planaria.pipeline.plan.plan_bound import lower_bound
from planaria.pipeline.plan.simulation import draw
from planaria.runtime.prediction.simulate import simulate

both = MessageBytes.both


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
