"""Losses at equal costs, against a second computation from the comparison's JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from planaria.lab.compare.race_results import ComparisonResults
from planaria.lab.report.comparison import body
from planaria.lab.report.equal_costs import budgets, equal_costs, equal_costs_table, has_equal_costs, loss_at_cost
from support.recomputed_comparison import losses
from support.report.synthetic_comparison import STEP_BYTES, compared, raced_exchanges


@pytest.fixture
def results() -> ComparisonResults:
    return raced_exchanges()


def between(points: list[tuple[float, float]], at: float) -> float | None:
    """Return the loss at a cost by hand: between two validations, and the last one after the end."""
    if at < points[0][0]:
        return None
    for (before, high), (after, low) in pairwise(points):
        if before <= at <= after:
            return high + (low - high) * (at - before) / (after - before)
    return points[-1][1]


def by_hand(arm: dict[str, Any], cost_of_tick: float, at: float) -> list[float | None]:
    return [between([(tick * cost_of_tick, loss) for tick, loss in losses(c)], at) for c in arm["courses"]]


def test_losses_at_equal_costs_follow_from_the_json(results: ComparisonResults) -> None:
    tree = json.loads(results.model_dump_json())
    arms = {arm["name"]: arm for arm in tree["arms"]}
    sent = {name: each / 1e6 for name, each in STEP_BYTES.items()}
    budget, controls = sorted(sent.values())[2] * tree["steps"], {"rare": "fault-free", "muon-rare": "muon"}
    assert budgets(results).megabytes == budget == 1000.0
    for row in equal_costs(results):
        arm, step_h = arms[row.arm.name], arms[row.arm.name]["step_s"] / 3600
        control = arms[controls.get(row.arm.name, "fault-free")]
        gaps = [losses(a)[-1][1] - losses(b)[-1][1] for a, b in zip(arm["courses"], control["courses"], strict=True)]
        expected = {
            "final": [losses(course)[-1][1] for course in arm["courses"]],
            "over_control": gaps,
            "at_first_end": by_hand(arm, step_h, 1000 * 20.0 / 3600),
            "at_control_end": by_hand(arm, step_h, 1000 * 40.0 / 3600),
            "at_megabytes": by_hand(arm, sent[row.arm.name], budget),
        }
        for name, numbers in expected.items():
            known = [number for number in numbers if number is not None]
            assert getattr(row, name) == pytest.approx((fmean(known), min(known), max(known))), (row.arm.name, name)


def test_a_loss_before_the_first_validation_is_unknown() -> None:
    assert loss_at_cost([(3.0, 5.0), (4.0, 3.0)], 2.9) is None
    assert loss_at_cost([(3.0, 5.0), (4.0, 3.0)], 3.5) == 4.0
    assert loss_at_cost([(3.0, 5.0), (4.0, 3.0)], 9.0) == 3.0


def test_the_report_has_the_table_only_if_replicas_exchange(results: ComparisonResults) -> None:
    assert "Losses at equal costs" in "".join(body(results))
    assert [row[0] for row in equal_costs_table(results).rows][-1] == "local"
    assert not has_equal_costs(compared()) and "Losses at equal costs" not in "".join(body(compared()))
