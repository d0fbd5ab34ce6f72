from __future__ import annotations

import io

import numpy as np

from planaria.observe.live.bars import SearchProgress, SurveyProgress
from planaria.planner.problem import Solution
from planaria.planner.search import Budget, Found


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, quiet: bool = False) -> str:
    with SurveyProgress(3, quiet, stream) as progress:
        progress.told("Bern – [bold]Oslo")
        progress.told("Bern – Rome")
    return stream.getvalue()


def test_plain_output_has_a_line_for_each_pair() -> None:
    assert shown(io.StringIO()) == "1/3 pairs: Bern – [bold]Oslo\n2/3 pairs: Bern – Rome\n"


def test_a_terminal_shows_how_many_pairs_are_done() -> None:
    last = shown(Terminal()).rpartition("Bern – Rome")[2]
    assert "2/3 pairs" in last


def test_quiet_says_nothing() -> None:
    assert shown(Terminal(), quiet=True) == ""


def searched(stream: io.StringIO, *steps: float) -> str:
    nothing = Solution(np.zeros(0, int), np.zeros(0, int), np.zeros((0, 0), int))
    with SearchProgress(Budget(moves=100), 1.0, False, stream) as progress:
        for place, step_s in enumerate(steps):
            progress.told(Found(nothing, step_s, 10 * place, 0.5 * place))
    return stream.getvalue()


def test_plain_output_has_a_line_for_each_plan_that_is_clearly_better() -> None:
    assert searched(io.StringIO(), 2.0, 1.99, 1.6) == (
        "     0.0 s  best 2.00 s, gap 50.0%, 0 moves\n     1.0 s  best 1.60 s, gap 37.5%, 20 moves\n"
    )


def test_a_terminal_shows_how_much_of_the_budget_is_spent() -> None:
    assert "60 %" in searched(Terminal(), 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.8)
