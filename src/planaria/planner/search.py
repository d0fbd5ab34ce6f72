"""The search for a plan: rounds of annealing, from ever new beginnings; the best so far can be had at any time.

All that depends on chance comes from the seed, and rounds are sized by the problem, not by the clock: the same seed
and the same number of moves give the same plan on any machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from planaria.planner.anneal import RANDOMS, anneal
from planaria.planner.evaluate import NEVER, makespan
from planaria.planner.problem import Problem, Solution
from planaria.planner.start import greedy

HOT, COLD = 0.1, 0.001
"""temperatures at the beginning and the end of a round, in step times of the round's beginning per data node: a move
mostly concerns one of them"""
CHUNK_WORK = 4_000_000
"""microbatch visits that are simulated between two looks at the clock"""
ROUND = 200_000
"""moves of the first round"""


@dataclass(frozen=True)
class Found:
    """The best plan so far."""

    solution: Solution
    step_s: float
    moves: int
    """moves tried until now"""
    seconds: float
    """since the search began"""


@dataclass(frozen=True)
class Budget:
    """What a search may spend; whichever is spent first ends it."""

    seconds: float = float("inf")
    moves: float = float("inf")


Watch = Callable[[Found], None]


def search(problem: Problem, seed: int, budget: Budget, watch: Watch = lambda found: None) -> Found:
    """The best plan found within ``budget``; ``watch`` is told every now and then, the step time never growing."""
    _warm(problem)
    began, spent = time.monotonic(), 0
    best = greedy(problem, random.Random(seed))
    least = step_ns(problem, best)
    size = chunk(problem)
    for number, length in enumerate(_rounds(size)):
        rng = np.random.default_rng([seed, number])
        chance = random.Random(f"{seed} {number}")
        now = greedy(problem, chance)
        scale = float(step_ns(problem, now)) / problem.sizes[0]
        for done in range(0, length, size):
            moves = int(min(size, length - done, budget.moves - spent))
            share = (done + np.arange(moves)) / length
            temperature = scale * HOT * (COLD / HOT) ** share
            least = anneal(
                problem.tables, now.origin, now.path, now.stage, rng.random((moves, RANDOMS)), temperature,
                best.origin, best.path, best.stage, least, True,
            )  # fmt: skip
            spent += moves
            found = Found(best.copy(), least / 1e9, spent, time.monotonic() - began)
            watch(found)
            if spent >= budget.moves or found.seconds >= budget.seconds:
                return found
    raise AssertionError("rounds never end")


def improve(problem: Problem, solution: Solution, seed: int, moves: int) -> Found:
    """``solution``, which must not deadlock, made better by so many moves of its routes; the arrangement stays."""
    began, now, best = time.monotonic(), solution.copy(), solution.copy()
    least = step_ns(problem, solution)
    temperature = np.full(moves, least * COLD / problem.sizes[0])
    least = anneal(
        problem.tables, now.origin, now.path, now.stage, np.random.default_rng(seed).random((moves, RANDOMS)),
        temperature, best.origin, best.path, best.stage, least, False,
    )  # fmt: skip
    return Found(best, least / 1e9, moves, time.monotonic() - began)


def _warm(problem: Problem) -> None:
    """Compile, which takes seconds the first time and belongs to no budget."""
    now = greedy(problem, random.Random(0))
    one, cold = np.zeros((1, RANDOMS)), np.ones(1)
    anneal(problem.tables, now.origin, now.path, now.stage, one, cold, *now.copy()[1:], now.stage.copy(), NEVER, True)


def step_ns(problem: Problem, solution: Solution) -> int:
    """The simulated step of a plan, nanoseconds."""
    return int(makespan(problem.tables, solution.origin, solution.path, np.zeros(problem.count, np.int64)))


def chunk(problem: Problem) -> int:
    """Moves between two looks at the clock."""
    return max(1, CHUNK_WORK // (problem.count * (problem.visits + 2)))


def _rounds(size: int) -> Iterator[int]:
    """Lengths in moves: short ones first, so that something good is there soon."""
    length = ROUND
    while True:
        yield length
        yield length
        length *= 2
