"""What if a step is over only when all gradients are summed, not when all passes are done?

The published instance (twenty nodes in twelve cities, five of them data nodes, a third of the stages skipped) with a
model of about 1.5 billion parameters, whose gradients are sent in 32 bits. A plan made for its passes alone is timed
with the sums, and held against a plan whose search knew them; then with gradients of 8 bits, and with what a single
link of the network would allow at least: the certified bound. Searches end by moves: the same on any machine.

The claim: knowing the sums, a step takes at most half of what it does without.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from benchmarks.common import Cell, Claim, Row, conclude, parser, start
from planaria.config import recipe, shipped
from planaria.pipeline.network.topology import read
from planaria.planner.bound import certificate
from planaria.planner.guidelines import broken
from planaria.planner.problem import Problem, Solution, problem_of
from planaria.planner.search import Budget, search, step_ns
from planaria.planner.tables import NO_SUMS

NAME = "planner_sums"
FLAGS = {"model.layers": "5", "model.hidden": "14336", "routing.sums": "true"}
"""five stages of one layer of width 4,096: 1.48 billion parameters with the ends"""


def published() -> Problem:
    topology = read(shipped.FOLDER / "topologies" / "twelve_cities.toml")
    return problem_of(recipe.load(shipped.find("twelve_cities"), FLAGS), topology)


def with_bits(problem: Problem, bits: int) -> Problem:
    """Messages of gradients that are so much shorter. Latency shrinks with them; beside their seconds it is nothing."""
    return replace(problem, sums=problem.sums * bits // 32)


def plans(given: argparse.Namespace, problem: Problem) -> list[tuple[Solution, Solution]]:
    """For each seed, a plan for the passes alone, and one for the sums too."""
    alone = replace(problem, sums=NO_SUMS)
    found = [
        tuple(search(asked, seed, Budget(moves=given.moves)).solution for asked in (alone, problem))
        for seed in given.seeds
    ]
    assert not any(broken(problem, plan) for pair in found for plan in pair)
    return [(without, knowing) for without, knowing in found]


def rows(given: argparse.Namespace) -> Iterator[Row]:
    whole = published()
    for bits, most in ((32, 0.5), (8, 1.0)):
        problem = with_bits(whole, bits)
        found = plans(given, problem)
        alone, with_sums = replace(problem, sums=NO_SUMS), []
        for what, pair in (("for its passes alone", 0), ("for its sums too", 1)):
            seconds = [step_ns(problem, one[pair]) / 1e9 for one in found]
            passes = [step_ns(alone, one[pair]) / 1e9 for one in found]
            beside: dict[str, Cell] = {"of it passes": f"{median(passes):.1f} s"}
            yield Row(f"{bits} bits: s of a step planned {what}", seconds, "see the bound", None, beside)
            with_sums.append(seconds)
        ratios = [knowing / without for without, knowing in zip(*with_sums, strict=True)]
        yield Row(f"{bits} bits: planned for its sums over not", ratios, "unknown", Claim(high=most))
        bound = certificate(problem)
        gaps = [bound.gap(seconds) for seconds in with_sums[1]]
        beside = {"bound": f"{bound.step_s:.2f} s", "binds": bound.binds}
        yield Row(f"{bits} bits: certified gap", gaps, "0", None, beside)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags.add_argument("--moves", type=int, default=2_000_000)
    given = flags.parse_args()
    return conclude(NAME, given, list(rows(given)), ["no time of this machine is in it"])


if __name__ == "__main__":
    start(main)
