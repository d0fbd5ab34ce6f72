"""Anytime search for a plan: rounds of annealing, each from a new greedy plan.

All randomness comes from the seed, and rounds are sized by the problem. The same seed and number of moves give the same
plan on any machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planaria.planner.anneal import RANDOMS, Floats, anneal
from planaria.planner.cells import search_by_cells
from planaria.planner.initial_plans import greedy_plan
from planaria.planner.makespan import NEVER, makespan
from planaria.planner.problem import PlanningProblem, Solution
from planaria.planner.tables import gradient_sum_times

INITIAL_TEMPERATURE = 0.1
"""temperature at the start of a round, in initial step times per data node, since most moves affect one data node"""
FINAL_TEMPERATURE = 0.001
CLOCK_CHECK_S = 0.05
"""seconds of moves between two checks of the clock"""
FIRST_ROUND = 200_000
"""moves of the first round"""


@dataclass(frozen=True)
class SearchResult:
    """The best plan found."""

    solution: Solution
    step_s: float
    moves: int
    """moves tried"""
    seconds: float
    """seconds since the search started"""


@dataclass(frozen=True)
class SearchBudget:
    """Limits of a search; the first one reached ends it."""

    seconds: float = float("inf")
    moves: float = float("inf")


OnProgress = Callable[[SearchResult], None]
"""receives the plan that the search would return now"""


class PlanSearch(Protocol):
    """A search for a plan, from a seed and within a budget."""

    def __call__(
        self, problem: PlanningProblem, seed: int, budget: SearchBudget, on_progress: OnProgress = ..., /
    ) -> SearchResult: ...


def search(
    problem: PlanningProblem, seed: int, budget: SearchBudget, on_progress: OnProgress = lambda _: None
) -> SearchResult:
    """Return the best plan found within ``budget``; call ``on_progress`` regularly, with step times that never grow."""
    _compile_kernels(problem)
    run = _Run(problem, seed, budget, on_progress)
    plans = search_by_cells(problem, random.Random(f"{seed} cells"), np.random.default_rng([seed, 0]), run.anneal_part)
    if plans is not None:
        for plan in plans:
            run.report(plan)
            if run.over:
                return run.found
    for number, length in enumerate(round_lengths()):
        run.run_round(number, length)
        if run.over:
            break
    return run.found


class _Run:
    """State of one search."""

    def __init__(self, problem: PlanningProblem, seed: int, budget: SearchBudget, on_progress: OnProgress) -> None:
        self.problem, self.seed, self.budget, self.on_progress = problem, seed, budget, on_progress
        self.began, self.spent = time.monotonic(), 0
        self._visits = 1.0
        """microbatch visits to simulate between two checks of the clock"""
        self.best = greedy_plan(problem, random.Random(seed))
        self.best_ns = step_ns(problem, self.best)

    @property
    def found(self) -> SearchResult:
        return SearchResult(self.best.copy(), self.best_ns / 1e9, self.spent, time.monotonic() - self.began)

    @property
    def over(self) -> bool:
        return self.budget.moves - self.spent < 1 or self._late

    @property
    def _late(self) -> bool:
        return time.monotonic() - self.began >= self.budget.seconds

    def report(self, plan: Solution) -> None:
        """Keep a plan of the whole problem if it is the best, and report progress."""
        if (step := step_ns(self.problem, plan)) < self.best_ns:
            self.best, self.best_ns = plan.copy(), step
        self.on_progress(self.found)

    def anneal_part(
        self, problem: PlanningProblem, solution: Solution, moves: int, rng: np.random.Generator
    ) -> tuple[Solution, int]:
        """Return a part's solution after a short round, and its step in nanoseconds."""
        best, now, moves = solution.copy(), solution.copy(), int(min(moves, self.budget.moves - self.spent))
        least = step_ns(problem, solution)
        temperature = least / problem.sizes[0] * _cooling(np.arange(moves) / max(1, moves))
        for step in self._anneal_in_pieces(problem, now, temperature, rng, best, least):
            least = step
        return best, least

    def run_round(self, number: int, length: int) -> None:
        """Run one round of ``length`` moves over the whole problem, or fewer if the budget ends."""
        problem, rng = self.problem, np.random.default_rng([self.seed, number])
        now = greedy_plan(problem, random.Random(f"{self.seed} {number}"))
        scale, moves = float(step_ns(problem, now)) / problem.sizes[0], int(min(length, self.budget.moves - self.spent))
        temperature = scale * _cooling(np.arange(moves) / length)
        for least in self._anneal_in_pieces(problem, now, temperature, rng, self.best, self.best_ns):
            self.best_ns = least
            self.on_progress(self.found)

    def _anneal_in_pieces(
        self,
        problem: PlanningProblem,
        now: Solution,
        temperature: Floats,
        rng: np.random.Generator,
        best: Solution,
        least: int,
    ) -> Iterator[int]:
        """Anneal ``now`` in pieces of about ``CLOCK_CHECK_S`` seconds; yield ``best``'s nanoseconds after each.

        Stop when the temperatures or the time run out. The length of the pieces does not change the result.
        """
        done = 0
        while done < len(temperature) and not self._late:
            piece = temperature[done : done + max(1, int(self._visits / problem.work))]
            began = time.monotonic()
            least = _anneal(problem, now, rng.random((len(piece), RANDOMS)), piece, best, least, True)
            pace = len(piece) * problem.work / max(1e-9, time.monotonic() - began)
            self._visits = min(2 * self._visits + problem.work, pace * CLOCK_CHECK_S)
            done, self.spent = done + len(piece), self.spent + len(piece)
            yield least


def _anneal(
    problem: PlanningProblem,
    now: Solution,
    chance: Floats,
    temperature: Floats,
    best: Solution,
    least: int,
    positions: bool,
) -> int:
    """Call ``anneal`` on ``now`` and ``best`` in place. ``least``: simulated step of ``best`` in nanoseconds."""
    return int(
        anneal(
            problem.tables, now.origin, now.path, now.stage, chance, temperature,
            best.origin, best.path, best.stage, least, positions,
        )
    )  # fmt: skip


def improve(problem: PlanningProblem, solution: Solution, seed: int, moves: int) -> SearchResult:
    """Improve the routes of ``solution``, which must not deadlock, by ``moves`` moves; stages stay as they are."""
    began, now, best = time.monotonic(), solution.copy(), solution.copy()
    least = step_ns(problem, solution)
    temperature = np.full(moves, least * FINAL_TEMPERATURE / problem.sizes[0])
    least = _anneal(problem, now, np.random.default_rng(seed).random((moves, RANDOMS)), temperature, best, least, False)
    return SearchResult(best, least / 1e9, moves, time.monotonic() - began)


def _compile_kernels(problem: PlanningProblem) -> None:
    """Compile before the budget starts: the first call takes seconds."""
    now = greedy_plan(problem, random.Random(0))
    _anneal(problem, now, np.zeros((1, RANDOMS)), np.ones(1), now.copy(), NEVER, True)


def _cooling(progress: Floats) -> Floats:
    """Return the temperatures at these shares of a round: a geometric sequence."""
    return np.asarray(INITIAL_TEMPERATURE * (FINAL_TEMPERATURE / INITIAL_TEMPERATURE) ** progress)


def step_ns(problem: PlanningProblem, solution: Solution) -> int:
    """Return the simulated step of a plan in nanoseconds: its passes and, if planned, its gradient sums."""
    done, over, tables = np.zeros(problem.count, np.int64), np.zeros(problem.nodes, np.int64), problem.tables
    passes = int(makespan(tables, solution.origin, solution.path, done, over))
    return passes if passes == NEVER else int(gradient_sum_times(tables, solution.stage, over)[0])


def round_lengths() -> Iterator[int]:
    """Yield the rounds' lengths in moves, short ones first."""
    length = FIRST_ROUND
    while True:
        yield length
        yield length
        length *= 2
