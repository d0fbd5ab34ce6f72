"""No plan beats its problem's lower bound, nor the bound that any prices give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.pipeline.routing.skipping import cc3_violation
from planaria.planner.bound.price_search import relaxed_bound
from planaria.planner.bound.resource_prices import (
    Prices,
    _earliest_return,
    _gap_integral,
    least_s,
    step_resources,
    workers_rule,
)
from planaria.planner.bound.route_enumeration import least_turns, routes_of, shortest_round_trips
from planaria.planner.bound.step_bound import DataNodeChoice, StepBound, best_data_nodes, raise_bound, step_lower_bound
from planaria.planner.guidelines import find_violations
from planaria.planner.makespan import NEVER
from planaria.planner.problem import NO_SAVING, ROLES, PlanningProblem, Solution
from planaria.planner.search import SearchBudget, search, step_ns
from support.planner_instances import (
    BEST,
    CA,
    NO_TC2,
    SKIP,
    full_columns,
    full_rows,
    problems,
    published,
    published_plan,
    random_plan,
    small_problem,
)


@pytest.mark.slow
@settings(max_examples=100)
@given(problems(least=1), st.integers(0, 2**32), st.booleans())
def test_no_random_plan_beats_the_bound(problem: PlanningProblem, seed: int, exact: bool) -> None:
    assert step_lower_bound(problem, 3, exact).step_s <= step_ns(problem, random_plan(problem, seed)) / 1e9


def test_no_published_plan_beats_the_bound() -> None:
    bound = step_lower_bound(published(), examinations=9).step_s
    assert 0 < bound <= min(step_ns(published(), published_plan(paths)) / 1e9 for paths in (CA, NO_TC2, SKIP))
    full = step_lower_bound(published(5)).step_s
    assert bound < full <= min(step_ns(published(5), plan) / 1e9 for plan in (full_columns(), full_rows(10)))


def tiny(seed: int, data: int | None = None, microbatches: int | None = None) -> PlanningProblem:
    """Return a problem with one or two data nodes and three workers at three sites, with few enough plans to try."""
    rng = np.random.default_rng(seed)
    data = data or 1 + seed % 2
    nodes = data + 3
    forward, backward = rng.integers(1, 9, (2, 3, nodes))
    transmit = rng.integers(0, 9, (3, 3))
    return small_problem(
        rng.integers(0, 3, nodes),
        (data, 2, 1),
        microbatches=microbatches or 3 - data,
        visits=int(rng.integers(1, 3)),
        swaps=1,
        jump=2,
        forward=forward,
        backward=backward,
        link=transmit + rng.integers(0, 20, (3, 3)),
        transmit=transmit,
        saving=transmit - rng.integers(0, 9, (3, 3)) if seed % 3 == 0 else NO_SAVING,
        slots=rng.integers(1, 3, nodes),
        role=np.array([ROLES.index("worker"), *[ROLES.index("any")] * (nodes - 1)]),
    )


def all_plans(problem: PlanningProblem) -> Iterator[Solution]:
    """Yield every valid arrangement and set of routes."""
    for order in permutations(range(problem.nodes)):
        stage = np.empty(problem.nodes, np.int64)
        stage[list(order)] = np.repeat(np.arange(len(problem.sizes)), problem.sizes)
        data = [node for node in order if stage[node] == 0]
        if list(order) != sorted(order, key=lambda node: (stage[node], node)) or 0 in data:
            continue
        workers = [node for node in order if node not in data]
        ways = [
            way
            for way in permutations(workers, problem.visits)
            if not cc3_violation(stage[list(way)].tolist(), problem.swaps, problem.jump)
        ]
        origin = np.array(data * problem.microbatches)
        for path in product(ways, repeat=problem.count):
            plan = Solution(stage, origin, np.array(path))
            used = np.bincount(stage[plan.path].ravel(), minlength=3)[1:]
            if used.max() - used.min() <= used.sum() % 2:
                yield plan


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_beats_the_bound_and_the_search_finds_the_best(seed: int) -> None:
    problem = tiny(seed)
    steps = [step_ns(problem, plan) for plan in all_plans(problem)]
    best = min(steps) / 1e9
    assert step_lower_bound(problem, exact=False).step_s <= best
    assert search(problem, seed, SearchBudget(moves=5000)).step_s == best
    assert len(set(steps)) > 1


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1)]))
def test_the_best_of_all_plans_does_not_beat_the_bound(seed: int, shape: tuple[int, int]) -> None:
    """The same holds for each choice of data nodes; for a lone microbatch the bound is tight."""
    problem = tiny(seed, *shape)
    ways = routes_of(problem)
    assert ways is not None
    best: dict[tuple[int, ...], int] = {}
    for plan in all_plans(problem):
        data = tuple(np.bincount(ways.kinds.kind_of[plan.stage == 0], minlength=len(ways.kinds.size)).tolist())
        best[data] = min(best.get(data, NEVER), step_ns(problem, plan))
    bound = step_lower_bound(problem, 20, exact=False)
    assert bound.step_s <= min(best.values()) / 1e9
    assert max(bound.terms.values()) == bound.step_s
    if shape == (1, 1):
        assert bound.step_s == min(best.values()) / 1e9
    for data, least in best.items():
        choice = DataNodeChoice(0, data)
        for _ in range(3):
            choice = raise_bound(problem, ways, choice._replace(ticks=max(choice.ticks, least // 2)))
            assert choice.ticks <= least


def test_the_best_known_plan_with_the_published_data_nodes_is_optimal() -> None:
    """Six microbatches of one node in Australia, over the same three nodes, determine the step."""
    problem = published()
    problem.role[:] = ROLES.index("worker")
    problem.role[[0, 3, 4, 10, 11]] = ROLES.index("data")
    assert find_violations(problem, BEST) == []
    assert step_lower_bound(problem).step_s == step_ns(problem, BEST) / 1e9 == 32.487054324


def lone(microbatches: int, slots: tuple[int, int], work: int, loss: int, link: int) -> PlanningProblem:
    """One data node and one worker; passes of ``work`` at the worker, ``loss`` at the return and 1 ns at the entry."""
    passes = np.array([[1, 1], [work, work], [loss, loss]])
    return small_problem(
        [0, 1],
        (1, 1),
        np.full((2, 2), link),
        microbatches=microbatches,
        forward=passes,
        backward=passes,
        slots=np.array(slots),
        role=np.array([ROLES.index("data"), ROLES.index("worker")]),
    )


def step_of(problem: PlanningProblem) -> int:
    count = problem.microbatches
    return step_ns(problem, Solution(np.array([0, 1]), np.zeros(count, np.int64), np.ones((count, 1), np.int64)))


@pytest.mark.filterwarnings("error")  # numpy's warnings would reach the user
@pytest.mark.parametrize(
    ("problem", "ticks", "binds"),
    [
        # Entry, hop, worker, hop, loss, and all of it back: 2 · (1 + 10 + 5 + 10 + 3).
        (lone(1, (1, 1), work=5, loss=3, link=10), 58, "turns"),
        # One slot at the data node: one after the other.
        (lone(4, (1, 3), work=5, loss=3, link=10), 4 * 58, "turns"),
        (lone(4, (3, 3), work=5, loss=3, link=10), 2 * 58, "turns"),
        # Sixteen passes of 9 at the worker, and the entry and one hop before and after them.
        (lone(8, (8, 8), work=9, loss=0, link=1), 16 * 9 + 4, "busiest node: all visits"),
        # Two passes of 9 and two of 1 for each of eight at the data node.
        (lone(8, (8, 8), work=0, loss=9, link=0), 8 * 20, "busiest node: a data node's own work"),
        # One slot at the worker, taken for 22 by each of four; before and after them the entry and one hop.
        (lone(4, (4, 1), work=1, loss=0, link=10), 4 * 22 + 2 * 11, "shared"),
        # Two slots: the second is taken after the first forward, and released one backward before the last.
        (lone(8, (8, 2), work=1, loss=0, link=10), (8 * 22 + 2 * 2 * 11 + 2) // 2, "shared"),
        # Three slots at the data node: before the sixth enters, three have returned and two entered, at 1 ns each.
        (lone(6, (3, 6), work=1, loss=0, link=10), 2 * 44 + 2 * 2, "turns"),
    ],
)
def test_the_binding_constraint(problem: PlanningProblem, ticks: int, binds: str) -> None:
    bound = step_lower_bound(problem, exact=False)
    assert round(bound.step_s * 1e9) == ticks
    assert bound.binds.startswith(binds)
    assert bound.step_s <= step_of(problem) / 1e9


@pytest.mark.parametrize("within", [0, 10])
@pytest.mark.parametrize(
    ("problem", "link"), [(lone(5, (1, 3), work=5, loss=3, link=10), 10), (lone(8, (8, 8), work=9, loss=0, link=1), 1)]
)
def test_the_bound_is_tight_if_there_is_no_choice(problem: PlanningProblem, link: int, within: int) -> None:
    """Serial microbatches, or one busy node; a node cannot visit itself, however near it is."""
    apart = replace(problem, link=np.array([[min(within, link), link], [link, min(within, link)]]))
    if link == 10 or within:
        assert step_of(apart) / 1e9 == step_lower_bound(apart, exact=False).step_s
    assert step_lower_bound(apart, exact=False).step_s <= step_of(apart) / 1e9


@pytest.mark.slow
def test_faster_nodes_and_nearer_sites_lower_the_bound() -> None:
    problem = published()
    near, quick = replace(problem, link=problem.link // 2), replace(problem, forward=problem.forward // 2)
    bound = step_lower_bound(problem, examinations=1).step_s
    for other in (near, quick, replace(problem, slots=problem.slots + 3)):
        assert step_lower_bound(other, examinations=1).step_s < bound


def test_the_gap_is_the_share_that_a_plan_could_gain() -> None:
    bound = StepBound(30.0, "all")
    assert bound.gap(40.0) == 0.25
    assert bound.gap(30.0) == 0.0
    assert StepBound(0.0, "all").gap(0.0) == 0.0


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
