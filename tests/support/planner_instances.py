"""The published instance and its routes, small problems, and random problems and plans for property tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from planaria.config import recipe, shipped
from planaria.pipeline.network import topology
from planaria.planner.initial_plans import random_routes
from planaria.planner.problem import NO_SAVING, ROLES, PlanningProblem, Solution, problem_of, stage_of
from planaria.planner.tables import NO_SUMS

RECIPE = shipped.find("twelve_cities")

STAGES = ((0, 3, 4, 10, 11), (15, 8, 14), (1, 9, 6), (16, 12, 13), (5, 18, 7), (17, 2, 19))
"""The published arrangement: data nodes, then the nodes of the five block stages."""
EACH = 6
"""Microbatches of each data node."""

Paths = dict[int, tuple[tuple[int, ...], ...]]
"""Data node → the routes of its microbatches, taken in turn."""

CA: Paths = {0: ((14, 6, 12),), 3: ((15, 17, 5),), 4: ((7, 13, 19),), 10: ((1, 18, 2),), 11: ((8, 16, 9),)}
"""SkipPipe's plan."""
NO_TC2: Paths = {
    0: ((12, 5, 19), (1, 19, 18), (6, 18, 17)),
    3: ((12, 6, 2), (14, 12, 2), (6, 14, 13)),
    4: ((15, 13, 7), (15, 5, 17), (15, 13, 7)),
    10: ((1, 17, 5), (1, 7, 2), (14, 18, 19)),
    11: ((8, 16, 9),),
}
"""SkipPipe's plan without its rule against collisions."""
SKIP: Paths = {
    0: ((12, 7, 17), (14, 16, 9), (1, 8, 19)),
    3: ((12, 7, 17), (15, 6, 5), (1, 8, 19)),
    4: ((13, 18, 2), (15, 6, 5), (1, 8, 19)),
    10: ((13, 18, 2), (15, 6, 5), (14, 16, 9)),
    11: ((13, 18, 2), (12, 7, 17), (14, 16, 9)),
}
"""Random skipping on the same arrangement (DT-FM skip)."""


_WALKS = """
    19 1 2  15 17 2  15 1 13  9 13 17  8 16 9  18 14 2
    12 14 2  18 14 13  8 15 5  7 19 5  19 14 6  12 18 1
    7 5 17  7 5 17  8 16 9  12 18 6  18 17 2  7 16 17
    7 17 15  8 16 9  18 14 12  18 2 1  7 1 13  19 15 17
    8 16 9  12 2 6  12 14 2  15 1 13  19 5 17  8 16 9
"""
BEST = Solution(
    np.array([0, 4, 5, 0, 0, 5, 4, 2, 1, 2, 0, 0, 2, 5, 3, 3, 3, 4, 1, 1]),
    np.array([0, 10, 3, 4, 11] * EACH),
    np.array(_WALKS.split(), np.int64).reshape(30, 3),
)
"""The plan that ``planaria plan`` finds in a minute with the published data nodes: stages, data nodes and routes."""


def published(visits: int = 3) -> PlanningProblem:
    """Return the twenty nodes of the recipe ``twelve_cities``; with five visits nothing is skipped."""
    config = recipe.load(RECIPE, {})
    assert config.network.topology
    problem = problem_of(config, topology.read(RECIPE.parent / config.network.topology))
    return replace(problem, visits=visits)


def small_problem(site: Sequence[int], sizes: tuple[int, ...], link: np.ndarray, **others: Any) -> PlanningProblem:
    """Return a problem with two slots a node, no queueing, no roles and one visit, except for ``others``."""
    nodes = len(site)
    defaults = {
        "names": tuple(f"node {n}" for n in range(nodes)),
        "sites": tuple(f"site {s}" for s in range(len(link))),
        "microbatches": 1,
        "visits": 1,
        "swaps": 0,
        "jump": 1,
        "transmit": np.zeros_like(link),
        "slots": np.full(nodes, 2),
        "role": np.zeros(nodes, np.int64),
    }
    return PlanningProblem(**defaults | {"site": np.array(site), "sizes": sizes, "link": link} | others)


def published_plan(paths: Paths) -> Solution:
    """Return the plan with each data node's microbatches along its routes in turn, on the published arrangement."""
    return _plan([(data, ways[j % len(ways)]) for j in range(EACH) for data, ways in paths.items()])


def full_columns() -> Solution:
    """Return the full pipeline with all data nodes: microbatch j of data node number a takes column (a + j) mod 3."""
    return _plan([(data, _column(a + j)) for j in range(EACH) for a, data in enumerate(STAGES[0])])


def full_rows(each: int) -> Solution:
    """Return the full pipeline in three rows, ``each`` microbatches on every row; two data nodes are idle."""
    return _plan([(STAGES[0][row], _column(row)) for _ in range(each) for row in range(3)])


def _column(k: int) -> tuple[int, ...]:
    return tuple(stage[k % 3] for stage in STAGES[1:])


def _plan(ways: Sequence[tuple[int, tuple[int, ...]]]) -> Solution:
    origin, path = (np.array(part, np.int64) for part in zip(*ways, strict=True))
    return Solution(stage_of(STAGES, 20), origin, path)


@st.composite
def problems(draw: st.DrawFn, least: int = 0) -> PlanningProblem:
    """Draw problems of 2 to 14 nodes at up to three sites, passes at block stages ``least`` nanoseconds or more.

    Times are small integers, so that many events coincide; nodes differ in speed.
    """
    sizes = draw(
        st.tuples(st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=4)).filter(
            lambda sizes: sizes[0] + sum(sizes[1]) <= 14
        )
    )
    data, stages, nodes = sizes[0], len(sizes[1]), sizes[0] + sum(sizes[1])
    visits, sites = draw(st.integers(1, stages)), draw(st.integers(1, 3))
    chance = random.Random(draw(st.integers(0, 2**32)))  # much faster than drawing each number
    slowest, longest = draw(st.sampled_from([1, 3, 40])), draw(st.sampled_from([0, 2, 50]))
    queueing = draw(st.booleans())

    def table(rows: int, columns: int, low: int, high: int) -> np.ndarray:
        return np.array([[chance.randint(low, high) for _ in range(columns)] for _ in range(rows)], np.int64)

    transmit = table(sites, sites, 0, longest)
    speed = table(1, nodes, 1, draw(st.integers(1, 3)))
    ends, block = table(4, 1, 0, slowest), table(2, 1, least, least + slowest)
    passes = [np.vstack([ends[k], block[k], ends[k + 2]]) * speed for k in range(2)]
    most = draw(st.integers(1, 3))
    return PlanningProblem(
        names=tuple(f"node {n}" for n in range(nodes)),
        sites=tuple(f"site {s}" for s in range(sites)),
        site=table(1, nodes, 0, sites - 1)[0],
        sizes=(data, *sizes[1]),
        microbatches=draw(st.integers(1, 4)),
        visits=visits,
        swaps=draw(st.integers(0, 2)),
        jump=draw(st.integers(stages - visits + 1, stages + 1)),
        forward=passes[0],
        backward=passes[1],
        link=transmit + table(sites, sites, 0, longest),
        transmit=transmit if queueing and transmit.any() else np.zeros_like(transmit),
        slots=table(1, nodes, 1, most)[0],
        role=np.array(_roles(data, nodes, chance), np.int64),
        saving=transmit - table(sites, sites, 0, longest) if draw(st.booleans()) else NO_SAVING,
        sums=np.stack([table(sites, sites, 0, 50), table(sites, sites, 0, 50)]) if draw(st.booleans()) else NO_SUMS,
    )


def arrangement(problem: PlanningProblem, rng: random.Random) -> list[list[int]]:
    """Return the nodes of each stage 0..S, at random within their roles."""
    role = [ROLES[r] for r in problem.role.tolist()]
    data = [n for n, r in enumerate(role) if r == "data"]
    free = [n for n, r in enumerate(role) if r == "any"]
    rng.shuffle(free)
    missing = problem.sizes[0] - len(data)
    data, rest = data + free[:missing], free[missing:] + [n for n, r in enumerate(role) if r == "worker"]
    rng.shuffle(rest)
    stages = [data]
    for size in problem.sizes[1:]:
        stages.append(rest[:size])
        rest = rest[size:]
    return stages


def any_plan(problem: PlanningProblem, seed: int) -> Solution:
    """Return routes over any different nodes in any order; some deadlock."""
    chance = random.Random(seed)
    stages = arrangement(problem, chance)
    plan = random_routes(problem, stages, chance, 0)
    others = [node for stage in stages[1:] for node in stage]
    path = [chance.sample(others, problem.visits) for _ in range(problem.count)]
    return plan._replace(path=np.array(path, np.int64))


def random_plan(problem: PlanningProblem, seed: int) -> Solution:
    """Return a random arrangement and random valid routes with as many swaps as allowed."""
    chance = random.Random(seed)
    return random_routes(problem, arrangement(problem, chance), chance, problem.swaps)


def _roles(data: int, nodes: int, chance: random.Random) -> list[int]:
    """Return enough of each role: some nodes must be data nodes, some must not, the others may."""
    must, never = chance.randint(0, data), chance.randint(0, nodes - data)
    roles = [1] * must + [2] * never + [0] * (nodes - must - never)
    chance.shuffle(roles)
    return roles
