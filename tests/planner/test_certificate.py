"""No plan beats its problem's certificate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import BEST, CA, NO_TC2, SKIP, full_columns, full_rows, problems, published, published_plan, random_plan

from planaria.pipeline.routing.skipping import disorder
from planaria.planner.bound import Certificate, Choice, certificate, closer
from planaria.planner.evaluate import NEVER
from planaria.planner.guidelines import broken
from planaria.planner.problem import ROLES, Problem, Solution
from planaria.planner.search import Budget, search, step_ns
from planaria.planner.ways import ways_of


@pytest.mark.slow
@settings(max_examples=100)
@given(problems(least=1), st.integers(0, 2**32), st.booleans())
def test_no_random_plan_beats_the_certificate(problem: Problem, seed: int, exact: bool) -> None:
    assert certificate(problem, 3, exact).step_s <= step_ns(problem, random_plan(problem, seed)) / 1e9


@pytest.mark.slow
@settings(max_examples=60)
@given(problems(least=1), st.integers(0, 99))
def test_no_found_plan_beats_the_certificate(problem: Problem, seed: int) -> None:
    assert certificate(problem, looks=3).step_s <= search(problem, seed, Budget(moves=2000)).step_s


def test_no_published_plan_beats_the_certificate() -> None:
    bound = certificate(published(), looks=9).step_s
    assert 0 < bound <= min(step_ns(published(), published_plan(paths)) / 1e9 for paths in (CA, NO_TC2, SKIP))
    full = certificate(published(5)).step_s
    assert bound < full <= min(step_ns(published(5), plan) / 1e9 for plan in (full_columns(), full_rows(10)))


def tiny(seed: int, data: int | None = None, microbatches: int | None = None) -> Problem:
    """One or two data nodes and three workers at three sites, of which one may not let in: few enough plans to try."""
    rng = np.random.default_rng(seed)
    data = data or 1 + seed % 2
    nodes = data + 3
    forward, backward = rng.integers(1, 9, (2, 3, nodes))
    transmit = rng.integers(0, 9, (3, 3))
    return Problem(
        names=("",) * nodes,
        sites=("", "", ""),
        site=rng.integers(0, 3, nodes),
        sizes=(data, 2, 1),
        microbatches=microbatches or 3 - data,
        visits=int(rng.integers(1, 3)),
        swaps=1,
        jump=2,
        forward=forward,
        backward=backward,
        link=transmit + rng.integers(0, 20, (3, 3)),
        transmit=transmit,
        slots=rng.integers(1, 3, nodes),
        role=np.array([ROLES.index("worker"), *[ROLES.index("any")] * (nodes - 1)]),
    )


def all_plans(problem: Problem) -> Iterator[Solution]:
    """Every arrangement and every set of routes that obeys the rules."""
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
            if not disorder(stage[list(way)].tolist(), problem.swaps, problem.jump)
        ]
        origin = np.array(data * problem.microbatches)
        for path in product(ways, repeat=problem.count):
            plan = Solution(stage, origin, np.array(path))
            used = np.bincount(stage[plan.path].ravel(), minlength=3)[1:]
            if used.max() - used.min() <= used.sum() % 2:
                yield plan


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_all_plans_there_are_and_the_search_finds_the_best(seed: int) -> None:
    problem = tiny(seed)
    steps = [step_ns(problem, plan) for plan in all_plans(problem)]
    best = min(steps) / 1e9
    assert certificate(problem, exact=False).step_s <= best
    assert search(problem, seed, Budget(moves=5000)).step_s == best
    assert len(set(steps)) > 1


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1)]))
def test_the_best_of_all_plans_does_not_beat_the_certificate(seed: int, shape: tuple[int, int]) -> None:
    """Nor one of any choice of data nodes its own; and a lone microbatch is as fast as it says."""
    problem = tiny(seed, *shape)
    ways = ways_of(problem)
    assert ways is not None
    best: dict[tuple[int, ...], int] = {}
    for plan in all_plans(problem):
        data = tuple(np.bincount(ways.kinds.of[plan.stage == 0], minlength=len(ways.kinds.size)).tolist())
        best[data] = min(best.get(data, NEVER), step_ns(problem, plan))
    bound = certificate(problem, 20, exact=False)
    assert bound.step_s <= min(best.values()) / 1e9
    assert max(bound.terms.values()) == bound.step_s
    if shape == (1, 1):
        assert bound.step_s == min(best.values()) / 1e9
    for data, least in best.items():
        choice = Choice(0, data)
        for _ in range(3):
            choice = closer(problem, ways, choice._replace(ticks=max(choice.ticks, least // 2)))
            assert choice.ticks <= least


def test_given_its_data_nodes_a_plan_of_the_published_instance_is_the_best_there_is() -> None:
    """Six microbatches of one node in Australia, by the same three nodes: nothing else can be last."""
    problem = published()
    problem.role[:] = ROLES.index("worker")
    problem.role[[0, 3, 4, 10, 11]] = ROLES.index("data")
    assert broken(problem, BEST) == []
    assert certificate(problem).step_s == step_ns(problem, BEST) / 1e9 == 32.487054324


def lone(microbatches: int, slots: tuple[int, int], work: int, loss: int, link: int) -> Problem:
    """One data node and one worker; passes of ``work`` at the worker and ``loss`` at the return, at 1 ns each way."""
    passes = np.array([[1, 1], [work, work], [loss, loss]])
    return Problem(
        names=("data", "worker"), sites=("here", "there"), site=np.array([0, 1]), sizes=(1, 1),
        microbatches=microbatches, visits=1, swaps=0, jump=1, forward=passes, backward=passes,
        link=np.full((2, 2), link), transmit=np.zeros((2, 2), np.int64), slots=np.array(slots),
        role=np.array([ROLES.index("data"), ROLES.index("worker")]),
    )  # fmt: skip


def step_of(problem: Problem) -> int:
    count = problem.microbatches
    return step_ns(problem, Solution(np.array([0, 1]), np.zeros(count, np.int64), np.ones((count, 1), np.int64)))


@pytest.mark.filterwarnings("error")  # of numpy, which a user would see
@pytest.mark.parametrize(
    ("problem", "ticks", "binds"),
    [
        # Entry, way, worker, way, loss, and all of it back: 2 · (1 + 10 + 5 + 10 + 3).
        (lone(1, (1, 1), work=5, loss=3, link=10), 58, "turns"),
        # One slot at the data node: one after the other.
        (lone(4, (1, 3), work=5, loss=3, link=10), 4 * 58, "turns"),
        (lone(4, (3, 3), work=5, loss=3, link=10), 2 * 58, "turns"),
        # Sixteen passes of 9 at the worker, and the entry and one way before them and after them.
        (lone(8, (8, 8), work=9, loss=0, link=1), 16 * 9 + 4, "busiest node: all visits"),
        # Two passes of 9 and two of 1 for each of eight at the data node.
        (lone(8, (8, 8), work=0, loss=9, link=0), 8 * 20, "busiest node: a data node's own work"),
        # One slot at the worker, taken for 22 by each of four; before and after them the entry and one way.
        (lone(4, (4, 1), work=1, loss=0, link=10), 4 * 22 + 2 * 11, "shared"),
        # Two slots: the second is taken when the first forward is made, and given back one backward before the last.
        (lone(8, (8, 2), work=1, loss=0, link=10), (8 * 22 + 2 * 2 * 11 + 2) // 2, "shared"),
        # Three slots at the data node: before the sixth enters, three are back and two have entered, at 1 ns each.
        (lone(6, (3, 6), work=1, loss=0, link=10), 2 * 44 + 2 * 2, "turns"),
    ],
)
def test_what_binds(problem: Problem, ticks: int, binds: str) -> None:
    bound = certificate(problem, exact=False)
    assert round(bound.step_s * 1e9) == ticks
    assert bound.binds.startswith(binds)
    assert bound.step_s <= step_of(problem) / 1e9


@pytest.mark.parametrize("within", [0, 10])
@pytest.mark.parametrize(
    ("problem", "link"), [(lone(5, (1, 3), work=5, loss=3, link=10), 10), (lone(8, (8, 8), work=9, loss=0, link=1), 1)]
)
def test_it_is_reached_where_nothing_is_left_to_choose(problem: Problem, link: int, within: int) -> None:
    """One after the other, or one node always at work; a node cannot visit itself, however near it is."""
    apart = replace(problem, link=np.array([[min(within, link), link], [link, min(within, link)]]))
    if link == 10 or within:
        assert step_of(apart) / 1e9 == certificate(apart, exact=False).step_s
    assert certificate(apart, exact=False).step_s <= step_of(apart) / 1e9


@pytest.mark.slow
def test_faster_nodes_and_nearer_sites_lower_it() -> None:
    problem = published()
    near, quick = replace(problem, link=problem.link // 2), replace(problem, forward=problem.forward // 2)
    bound = certificate(problem, looks=1).step_s
    for other in (near, quick, replace(problem, slots=problem.slots + 3)):
        assert certificate(other, looks=1).step_s < bound


def test_the_gap_is_what_a_plan_may_at_most_gain() -> None:
    bound = Certificate(30.0, "all")
    assert bound.gap(40.0) == 0.25
    assert bound.gap(30.0) == 0.0
    assert Certificate(0.0, "all").gap(0.0) == 0.0
