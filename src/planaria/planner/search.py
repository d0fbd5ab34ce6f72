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

from planaria.planner.anneal import RANDOMS, Floats, anneal
from planaria.planner.cells import by_cells
from planaria.planner.evaluate import NEVER, makespan
from planaria.planner.problem import Problem, Solution
from planaria.planner.start import greedy
from planaria.planner.tables import summed

HOT, COLD = 0.1, 0.001
"""temperatures at the beginning and the end of a round, in step times of the round's beginning per data node: a move
mostly concerns one of them"""
LOOK_S = 0.05
"""seconds of moves between two looks at the clock"""
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
    run = _Run(problem, seed, budget, watch)
    plans = by_cells(problem, random.Random(f"{seed} cells"), np.random.default_rng([seed, 0]), run.annealed)
    if plans is not None:
        for plan in plans:
            run.tell(plan)
            if run.over:
                return run.found
    for number, length in enumerate(_rounds()):
        run.round(number, length)
        if run.over:
            break
    return run.found


class _Run:
    """One search under way."""

    def __init__(self, problem: Problem, seed: int, budget: Budget, watch: Watch) -> None:
        self.problem, self.seed, self.budget, self.watch = problem, seed, budget, watch
        self.began, self.spent = time.monotonic(), 0
        self._visits = 1.0
        """microbatch visits that are simulated between two looks at the clock"""
        self.best = greedy(problem, random.Random(seed))
        self.least = step_ns(problem, self.best)

    @property
    def found(self) -> Found:
        return Found(self.best.copy(), self.least / 1e9, self.spent, time.monotonic() - self.began)

    @property
    def over(self) -> bool:
        return self.spent >= self.budget.moves or self._late

    @property
    def _late(self) -> bool:
        return time.monotonic() - self.began >= self.budget.seconds

    def tell(self, plan: Solution) -> None:
        """A plan of the whole, which may be the best so far."""
        if (step := step_ns(self.problem, plan)) < self.least:
            self.best, self.least = plan.copy(), step
        self.watch(self.found)

    def annealed(
        self, problem: Problem, solution: Solution, moves: int, rng: np.random.Generator
    ) -> tuple[Solution, int]:
        """Return a part's solution after a short round, and its step in nanoseconds."""
        best, now, moves = solution.copy(), solution.copy(), int(min(moves, self.budget.moves - self.spent))
        least = step_ns(problem, solution)
        temperature = least / problem.sizes[0] * HOT * (COLD / HOT) ** (np.arange(moves) / max(1, moves))
        *_, least = least, *self._pieces(problem, now, temperature, rng, best, least)
        return best, least

    def round(self, number: int, length: int) -> None:
        """Run one round of ``length`` moves over the whole, or fewer if the budget is spent."""
        problem, rng = self.problem, np.random.default_rng([self.seed, number])
        now = greedy(problem, random.Random(f"{self.seed} {number}"))
        scale, moves = float(step_ns(problem, now)) / problem.sizes[0], int(min(length, self.budget.moves - self.spent))
        temperature = scale * HOT * (COLD / HOT) ** (np.arange(moves) / length)
        for least in self._pieces(problem, now, temperature, rng, self.best, self.least):
            self.least = least
            self.watch(self.found)

    def _pieces(
        self, problem: Problem, now: Solution, temperature: Floats, rng: np.random.Generator, best: Solution, least: int
    ) -> Iterator[int]:
        """Anneal ``now`` in pieces until no temperature or no time is left; yield ``best``'s nanoseconds after each.

        The pieces take about ``LOOK_S`` each, however fast this machine is. Their length does not change the result.
        """
        done = 0
        while done < len(temperature) and not self._late:
            piece = temperature[done : done + max(1, int(self._visits / problem.work))]
            began = time.monotonic()
            least = _anneal(problem, now, rng.random((len(piece), RANDOMS)), piece, best, least, True)
            pace = len(piece) * problem.work / max(1e-9, time.monotonic() - began)
            self._visits = min(2 * self._visits + problem.work, pace * LOOK_S)
            done, self.spent = done + len(piece), self.spent + len(piece)
            yield least


def _anneal(
    problem: Problem, now: Solution, chance: Floats, temperature: Floats, best: Solution, least: int, places: bool
) -> int:
    """``anneal`` of ``now``, in place; ``best``, of ``least`` nanoseconds, follows."""
    return int(
        anneal(
            problem.tables, now.origin, now.path, now.stage, chance, temperature,
            best.origin, best.path, best.stage, least, places,
        )
    )  # fmt: skip


def improve(problem: Problem, solution: Solution, seed: int, moves: int) -> Found:
    """``solution``, which must not deadlock, made better by so many moves of its routes; the arrangement stays."""
    began, now, best = time.monotonic(), solution.copy(), solution.copy()
    least = step_ns(problem, solution)
    temperature = np.full(moves, least * COLD / problem.sizes[0])
    least = _anneal(problem, now, np.random.default_rng(seed).random((moves, RANDOMS)), temperature, best, least, False)
    return Found(best, least / 1e9, moves, time.monotonic() - began)


def _warm(problem: Problem) -> None:
    """Compile, which takes seconds the first time and belongs to no budget."""
    now = greedy(problem, random.Random(0))
    _anneal(problem, now, np.zeros((1, RANDOMS)), np.ones(1), now.copy(), NEVER, True)


def step_ns(problem: Problem, solution: Solution) -> int:
    """The simulated step of a plan, nanoseconds: its passes, and the sums of gradients if they are planned too."""
    done, over, tables = np.zeros(problem.count, np.int64), np.zeros(problem.nodes, np.int64), problem.tables
    passes = int(makespan(tables, solution.origin, solution.path, done, over))
    return passes if passes == NEVER else int(summed(tables, solution.stage, over)[0])


def _rounds() -> Iterator[int]:
    """Lengths in moves: short ones first, so that something good is there soon."""
    length = ROUND
    while True:
        yield length
        yield length
        length *= 2
