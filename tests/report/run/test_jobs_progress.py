"""What the terminal shows while jobs are done."""

from __future__ import annotations

import io

from planaria.report.observe.jobs_progress import JobsProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, quiet: bool = False) -> str:
    with JobsProgress(quiet, stream) as progress:
        progress.progressed("experts of seed 1, 0 of 2 done", 50, 300, {"law": (20, 150), "[code]": (30, 150)})
        progress.note("[code]: killed by SIGKILL; taken up again")
        progress.progressed("experts of seed 1, 1 of 2 done", 190, 300, {"[code]": (40, 150)})
    return stream.getvalue()


def test_a_terminal_gets_a_bar_for_all_one_for_each_that_is_at_work_and_lines_above_them() -> None:
    text = shown(Terminal())
    last = text.rpartition("experts of seed 1, 1 of 2 done")[2]
    assert "190/300 steps" in last and "[code]" in last and "40/150 steps" in last
    assert "20/150 steps" not in last, "law is done"
    assert "[code]: killed by SIGKILL; taken up again" in text


def test_anything_else_gets_the_lines_alone() -> None:
    assert shown(io.StringIO()) == "[code]: killed by SIGKILL; taken up again\n"


def test_quiet_is_quiet() -> None:
    assert shown(Terminal(), quiet=True) == ""
