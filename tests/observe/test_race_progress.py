from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import pytest

from planaria.observe.live.race_progress import RaceProgress

RUNS = [("[bold]echo", 1), ("[bold]echo", 2), ("checkpoint", 1)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_has_one_line_for_each_run_that_is_done() -> None:
    stream = io.StringIO()
    with RaceProgress(RUNS, 3, False, stream) as progress:
        for tick in (1, 2, 3):
            progress.told("checkpoint", 1, tick)
            progress.told("[bold]echo", 2, tick)
        progress.told("[bold]echo", 1, 2)
    assert stream.getvalue().splitlines() == ["1/3 runs: checkpoint, seed 1", "2/3 runs: [bold]echo, seed 2"]


def test_a_run_that_was_done_before_is_told_at_once_and_only_once() -> None:
    stream = io.StringIO()
    with RaceProgress(RUNS, 500, False, stream) as progress:
        progress.told("checkpoint", 1, 500)
        progress.told("checkpoint", 1, 500)
    assert stream.getvalue() == "1/3 runs: checkpoint, seed 1\n"


def test_a_terminal_shows_who_runs_and_counts_who_is_done() -> None:
    stream = Terminal()
    with RaceProgress(RUNS, 10, False, stream) as progress:
        progress.told("checkpoint", 1, 10)
        progress.told("[bold]echo", 2, 4)
    last = stream.getvalue().rpartition("1 of 3 runs done")[2]
    assert "14/30" in last
    assert "[bold]echo, seed 2" in last and "4/10" in last
    assert "checkpoint" not in last


def test_quiet_says_nothing() -> None:
    stream = Terminal()
    with RaceProgress(RUNS, 1, True, stream) as progress:
        progress.told("checkpoint", 1, 1)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_many_threads_may_tell(terminal: bool) -> None:
    runs = [("arm", seed) for seed in range(8)]
    stream = Terminal() if terminal else io.StringIO()
    with RaceProgress(runs, 50, False, stream) as progress, ThreadPoolExecutor(8) as pool:
        told = [pool.submit(lambda s=seed: [progress.told("arm", s, t) for t in range(51)]) for _, seed in runs]  # type: ignore[misc]
        for one in told:
            one.result()
    if terminal:
        assert "8 of 8 runs done" in stream.getvalue()
    else:
        assert [line.split()[0] for line in stream.getvalue().splitlines()] == [f"{n}/8" for n in range(1, 9)]
