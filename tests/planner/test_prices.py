"""Any prices give a lower bound on the step of every plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.planner.bound.price_search import relaxed_bound
from planaria.planner.bound.resource_prices import Prices, least_s, step_resources
from planaria.planner.bound.route_enumeration import least_turns, routes_of, shortest_round_trips
from planaria.planner.bound.step_bound import best_data_nodes
from planaria.planner.bound.step_limits import _earliest_return, _gap_integral, workers_rule
from planaria.planner.problem import PlanningProblem
from planaria.planner.search import step_ns
from support.planner_instances import problems, published, random_plan


@settings(max_examples=60)
@given(problems(least=1), st.integers(0, 2**32), st.floats(0.5, 2))
def test_no_prices_give_more_than_the_step_of_a_plan(problem: PlanningProblem, seed: int, share: float) -> None:
    """Even under the assumption of a shorter step: the step is longer than assumed, or than the prices' bound."""
    ways, plan, chance = routes_of(problem), random_plan(problem, seed), np.random.default_rng(seed)
    assert ways is not None
    step = step_ns(problem, plan) / 1e9
    data = np.bincount(ways.kinds.kind_of[plan.stage == 0], minlength=len(ways.kinds.size))
    drawn = chance.random((4, len(data))) ** 3 * (chance.random((4, len(data))) < 0.7)
    sets = len(workers_rule(problem, ways, ways.kinds.size - data).needed)
    away = chance.random(sets) * (chance.random(sets) < 0.1) * 1e-9
    long = chance.random((len(data), problem.microbatches)) * 1e-9
    prices = Prices(*(drawn * [[1], [1], [1], [1e-9]]), long, away)
    for least in (0.0, float(chance.random()) * step):
        for most in (np.inf, share * step):
            bound = least_s(problem, ways, step_resources(problem, ways, data, least, most), prices)
            assert min(bound, most) <= step * (1 + 1e-9)


@settings(max_examples=15)
@given(problems(least=1), st.integers(0, 2**32))
def test_the_best_prices_give_more_than_others(problem: PlanningProblem, seed: int) -> None:
    ways, plan, chance = routes_of(problem), random_plan(problem, seed), np.random.default_rng(seed)
    assert ways is not None
    data = np.bincount(ways.kinds.kind_of[plan.stage == 0], minlength=len(ways.kinds.size))
    there_is = step_resources(problem, ways, data, 0.0)  # no step is assumed, so only prices matter
    best, prices = relaxed_bound(problem, ways, there_is)
    assert best == least_s(problem, ways, there_is, prices) <= step_ns(problem, plan) / 1e9 * (1 + 1e-9)
    for _ in range(5):
        other = Prices(*(each * np.exp(chance.normal(0, 0.3, each.shape)) for each in prices))
        assert least_s(problem, ways, there_is, other) <= best * (1 + 2e-4)


@pytest.mark.slow
def test_closer_examination_never_lowers_the_bound() -> None:
    looks = [best_data_nodes(published(), n) for n in (1, 70)]
    ticks = [choice.ticks for choice in looks if choice]
    assert len(ticks) == 2 and ticks == sorted(ticks) and ticks[0] < ticks[-1]
    last = looks[-1]
    assert last is not None and sum(last.data) == published().sizes[0]


def test_turns_are_those_of_a_machine_that_does_one_thing_at_a_time() -> None:
    """With three slots, against the definition, plus an entry and a last backward between the rounds."""
    problem = published()
    ways = routes_of(problem)
    assert ways is not None
    alone = shortest_round_trips(problem, ways.kinds)
    assert (least_turns(problem, alone) == 2 * alone + 2 * (440_000_000 + 660_000_000)).all()
    for k, first in enumerate(ways.kinds.first):  # two derivations of one number
        may = (ways.uses <= ways.kinds.size - np.eye(len(ways.kinds.size))[k]).all(axis=1)
        assert alone[first] == ways.length[k, may].min()


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 4), *[st.integers(0, 9)] * 2, st.integers(10, 40), st.integers(0, 40))
def test_more_long_routes_take_longer(count: int, slots: int, enters: int, leaves: int, short: int, more: int) -> None:
    """With none or only long ones, they are the turns of one length."""
    passes = np.array([[enters], [0], [0]]), np.array([[leaves], [0], [0]])
    alone = replace(
        published(), names=("one",), microbatches=count, slots=np.array([slots]), forward=passes[0], backward=passes[1]
    )
    took = _earliest_return(count, slots, enters, leaves, short, short + more)
    assert list(took) == sorted(took) and len(took) == count + 1
    assert (
        took[0] == least_turns(alone, np.array([short]))[0]
        and took[-1] == least_turns(alone, np.array([short + more]))[0]
    )


@pytest.mark.parametrize(
    ("one", "other", "area"),
    [
        ([(0.0, 3.0)], [(0.0, 3.0)], 0.0),
        ([(2.0, 3.0)], [(0.0, 3.0)], 6.0),
        ([(0.0, 3.0)], [(1.0, 1.0), (4.0, 9.0)], 9.0),
    ],
)
def test_missing_capacity_is_an_area(
    one: list[tuple[float, float]], other: list[tuple[float, float]], area: float
) -> None:
    assert _gap_integral(one, other, 3.0, 10.0) == area
