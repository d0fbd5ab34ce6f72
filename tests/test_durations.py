"""Durations on the command line, parsed alike by every flag."""

from __future__ import annotations

import pytest

from command_line import refused
from planaria.cli.commands.schedule import parse_budget
from planaria.config.durations import seconds
from planaria.planner.search import SearchBudget


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("90", 90), ("1.5s", 1.5), (".5 s", 0.5), ("5min", 300), ("5m", 300), ("2h", 7200)]
)
def test_a_duration_is_in_seconds_unless_it_has_a_unit(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "s", "-1", "nan", "inf", "1e3", "1 day", "1e9h", "300000h", "5 5", "٣s"])
def test_an_invalid_duration_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r": not a duration; give seconds, or a time such as 60s, 5min or 2h"):
        seconds(text)
    for command in (["join", "run", "--patience"], ["run", "chaos", "run", "--kill", "stage=1", "--resume-after"]):
        line = refused(capsys, *command[:-1], f"{command[-1]}={text}")
        assert f"'{command[-1]}': " in line and "not a duration" in line


def test_a_budget_is_a_duration_or_a_number_of_moves() -> None:
    assert parse_budget("5min") == SearchBudget(seconds=300) and parse_budget("60 s") == SearchBudget(seconds=60)
    assert parse_budget("300000moves") == parse_budget("300000 moves") == SearchBudget(moves=300_000)
