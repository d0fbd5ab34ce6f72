from __future__ import annotations

import io
import re
from collections.abc import Callable

import numpy as np
import pytest

from planaria.control.log.run_record import StepMetric, ValidationMetric
from planaria.planner.problem import Solution
from planaria.planner.search import SearchBudget, SearchResult
from planaria.report.observe import bars
from planaria.report.observe.bars import BarDisplay, CountProgress, JobsProgress, SearchProgress, SurveyProgress
from planaria.report.observe.progress import Progress
from support.command_line import Terminal


def shown(stream: io.StringIO, quiet: bool = False) -> str:
    with SurveyProgress(3, quiet, stream) as progress:
        progress.update("Bern – [bold]Oslo")
        progress.update("Bern – Rome")
    return stream.getvalue()


def test_plain_output_has_a_line_for_each_pair() -> None:
    assert shown(io.StringIO()) == "1/3 pairs: Bern – [bold]Oslo\n2/3 pairs: Bern – Rome\n"


def test_quiet_prints_nothing() -> None:
    assert shown(Terminal(), quiet=True) == ""


def searched(stream: io.StringIO, *steps: float) -> str:
    nothing = Solution(np.zeros(0, int), np.zeros(0, int), np.zeros((0, 0), int))
    with SearchProgress(SearchBudget(moves=100), 1.0, False, stream) as progress:
        for place, step_s in enumerate(steps):
            progress.update(SearchResult(nothing, step_s, 10 * place, 0.5 * place))
    return stream.getvalue()


def test_plain_output_has_a_line_for_each_change_of_at_least_one_percent() -> None:
    assert searched(io.StringIO(), 2.0, 1.99, 1.6, 1.8) == (
        "     0.0 s  step 2.00 s, gap 50.0%, 0 moves\n"
        "     1.0 s  step 1.60 s, gap 37.5%, 20 moves\n"
        "     1.5 s  step 1.80 s, gap 44.4%, 30 moves\n"
    )


def test_plain_output_has_three_digits_of_milliseconds() -> None:
    steps = re.findall(r"step (\S+) s", searched(io.StringIO(), 0.0951, 0.0923, 0.0))
    assert steps == ["0.0951", "0.0923", "0.00"]


def test_a_terminal_shows_the_spent_share_of_the_budget() -> None:
    assert "60 %" in searched(Terminal(), 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.8)


LONG = "a description that is far longer than any terminal has room for, such as a path or a title of an experiment"


def train(stream: io.StringIO) -> None:
    progress = Progress(stream)
    progress.start(100_000, 0)
    progress.on_metric(ValidationMetric(t=0, step=99_900, val_loss=4.94321))
    for step in range(3):
        progress.on_metric(StepMetric(t=0, step=step, loss=4.94321, tokens_per_s=123_456.7, grad_norm={}))
    progress.stop()


def enter(display: BarDisplay, move: Callable[[], object]) -> None:
    with display:
        move()


def jobs(stream: io.StringIO) -> None:
    display = JobsProgress(False, stream)
    enter(display, lambda: display.on_progress(LONG, 120, 1000, {LONG: (20, 150)}))


def survey(stream: io.StringIO) -> None:
    display = SurveyProgress(30, False, stream)
    enter(display, lambda: display.update(LONG))


def count(stream: io.StringIO) -> None:
    display = CountProgress(LONG, "samples", 500, stream)
    enter(display, lambda: display.advance(120))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("shown", [train, jobs, survey, count])
def test_a_terminal_of_any_width_has_a_bar_and_the_remaining_time_uncut(
    shown: Callable[[io.StringIO], None], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    shown(stream := Terminal())
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", plain) if "/" in line]
    assert lines
    for line in lines:
        assert len(line.rstrip()) <= width and re.search(r"(-:--:--|\d+:\d\d:\d\d) *$", line), line
        assert len(re.findall("[━╸╺]", line)) >= 3, line
    if shown is train and width == 80:
        assert "loss 4.9432  validation 4.9432 (step 99900)" in lines[-1] and "tokens/s" not in lines[-1]


def test_a_count_without_a_terminal_prints_a_line_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    with CountProgress("reading", "samples", 9, stream := io.StringIO()) as progress:
        for _ in range(9):
            progress.advance()
            now[0] += 2
    assert stream.getvalue() == "reading: 4/9 samples\nreading: 7/9 samples\n"


def jobs_shown(stream: io.StringIO, quiet: bool = False) -> str:
    with JobsProgress(quiet, stream) as progress:
        progress.on_progress("experts of seed 1, 0 of 2 done", 50, 300, {"law": (20, 150), "[code]": (30, 150)})
        progress.print_note("[code]: killed by SIGKILL; taken up again")
        progress.on_progress("experts of seed 1, 1 of 2 done", 190, 300, {"[code]": (40, 150)})
    return stream.getvalue()


def test_a_terminal_shows_a_bar_for_all_jobs_and_one_for_each_running_job() -> None:
    text = jobs_shown(Terminal())
    last = text.rpartition("experts of seed 1, 1 of 2 done")[2]
    assert "190/300 steps" in last and "[code]" in last and "40/150 steps" in last
    assert "20/150 steps" not in last, "law is done"
    assert "[code]: killed by SIGKILL; taken up again" in text


def test_without_a_terminal_jobs_print_their_notes_only() -> None:
    assert jobs_shown(io.StringIO()) == "[code]: killed by SIGKILL; taken up again\n"
