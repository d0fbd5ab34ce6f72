"""How much could be left to gain? The certified gap, 1 − bound / step, of plans found with so many moves.

Searches end by moves, not by the clock: the same plans and gaps on any machine, busy or idle.

- The published instance, with its data nodes given and with the planner free to choose them.
- A thousand nodes at twenty sites, by cells.
- The networks of ``benchmarks.planner``: 10 to 50 nodes, speeds 1 and 2.
- Tiny problems of one or two data nodes, all of whose plans are tried here, by a program of its own: how far below the
  best the bound is, and how far it would be if it did not try them all itself.

The claims: ≤ 5 % with data nodes given, ≤ 15 % free, ≤ 25 % with 1,000 nodes; the bound of a tiny problem is the best
of its plans, and no plan at all beats what the bound would be otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import permutations, product

import numpy as np

from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.planner import PUBLISHED_DATA, generated, published, with_data
from planaria.pipeline.routing.skipping import disorder
from planaria.planner.bound import certificate
from planaria.planner.evaluate import NEVER
from planaria.planner.guidelines import broken
from planaria.planner.problem import Problem, Solution
from planaria.planner.search import Budget, search, step_ns

NAME = "planner_bound"


def gap_row(what: str, problem: Problem, seed: int, moves: int, most: float) -> Row:
    """One search and its gap; an invalid plan fails."""
    found, bound = search(problem, seed, Budget(moves=moves)), certificate(problem)
    sound = not broken(problem, found.solution)
    beside: dict[str, float | int | str] = {
        "step": f"{found.step_s:.2f} s", "bound": f"{bound.step_s:.2f} s", "moves": moves,
        "terms": ", ".join(f"{name.split(':')[0]} {seconds:.2f}" for name, seconds in bound.terms.items()),
    }  # fmt: skip
    return Row(what, [bound.gap(found.step_s)], "0", Claim(high=most if sound else -1.0), beside)


def fresh_row(networks: int, moves: int) -> Row:
    gaps = []
    for n in range(networks):
        nodes = 10 + 40 * n // max(1, networks - 1)
        problem = generated(n, nodes, 4 + n % 9, 3 + n % 4, max(1, nodes // 5), (1.0, 2.0), (2, 3, 4))
        gaps.append(certificate(problem).gap(search(problem, n, Budget(moves=moves)).step_s))
    return Row(f"{networks} networks of 10 to 50 nodes", gaps, "0", None, {"moves": moves})


def tiny(seed: int) -> Problem:
    """One or two data nodes and three workers at three sites; times are a few nanoseconds."""
    rng = np.random.default_rng(seed)
    data = 1 + seed % 2
    nodes, transmit = data + 3, rng.integers(0, 9, (3, 3))
    forward, backward = rng.integers(1, 9, (2, 3, nodes))
    return Problem(
        names=("",) * nodes, sites=("", "", ""), site=rng.integers(0, 3, nodes), sizes=(data, 2, 1),
        microbatches=3 - data, visits=int(rng.integers(1, 3)), swaps=1, jump=2, forward=forward, backward=backward,
        link=transmit + rng.integers(0, 20, (3, 3)), transmit=transmit, slots=rng.integers(1, 3, nodes),
        role=np.zeros(nodes, np.int64),
    )  # fmt: skip


def plans(problem: Problem) -> Iterator[Solution]:
    """Every arrangement and every set of routes that obeys the rules."""
    for order in permutations(range(problem.nodes)):
        stage = np.empty(problem.nodes, np.int64)
        stage[list(order)] = np.repeat(np.arange(len(problem.sizes)), problem.sizes)
        if list(order) != sorted(order, key=lambda node: (stage[node], node)):
            continue
        workers = np.flatnonzero(stage).tolist()
        ways = [
            way
            for way in permutations(workers, problem.visits)
            if not disorder(stage[list(way)].tolist(), problem.swaps, problem.jump)
        ]
        letting = np.flatnonzero(stage == 0).tolist() * problem.microbatches
        for origin, path in product({*permutations(letting)}, product(ways, repeat=problem.count)):
            used = np.bincount(stage[np.array(path)].ravel(), minlength=3)[1:]
            if used.max() - used.min() <= used.sum() % 2:
                yield Solution(stage, np.array(origin), np.array(path))


def tiny_rows(count: int) -> list[Row]:
    problems = [tiny(seed) for seed in range(count)]
    best = [min((step_ns(problem, plan) for plan in plans(problem)), default=NEVER) / 1e9 for problem in problems]
    found = []
    for what, exact, claim in (("the bound", True, Claim(0.0, 1e-9)), ("without trying all plans", False, Claim(0.0))):
        gaps = [certificate(problem, exact=exact).gap(step) for problem, step in zip(problems, best, strict=True)]
        met = {"bound is the optimum": f"{sum(abs(gap) < 1e-9 for gap in gaps)} of {count}"}
        for judged in ("least", "worst") if exact else ("least",):
            found.append(Row(f"{count} tiny problems, {what}", gaps, "0", claim, met, judged))
    return found


def rows(given: argparse.Namespace) -> Iterator[Row]:
    seed, moves = given.seed, given.moves
    yield gap_row("published, data nodes given", with_data(published(), PUBLISHED_DATA), seed, moves, 0.05)
    yield gap_row("published, data nodes free", published(), seed, 2 * moves, 0.15)
    large = generated(1, 1000, 20, 7, 200, (1.0,), (3,))
    yield gap_row("1,000 nodes, 1,200 microbatches", large, seed, given.large_moves, 0.25)
    yield fresh_row(given.networks, given.network_moves)
    yield from tiny_rows(given.tiny)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--moves", type=int, default=1_000_000, help="for the published instance; twice for free nodes")
    flags.add_argument("--large-moves", type=int, default=3_000_000)
    flags.add_argument("--networks", type=int, default=20)
    flags.add_argument("--network-moves", type=int, default=20_000)
    flags.add_argument("--tiny", type=int, default=60)
    given = flags.parse_args()
    return conclude(NAME, given, list(rows(given)), ["a gap is 1 − bound / step; no time of this machine is in it"])


if __name__ == "__main__":
    start(main)
