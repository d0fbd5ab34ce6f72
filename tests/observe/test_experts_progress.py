"""What the terminal shows while experts train."""

from __future__ import annotations

import io

from planaria.observe.live.experts_progress import ExpertsProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, quiet: bool = False) -> str:
    with ExpertsProgress(quiet, stream) as progress:
        progress.training("seed 1, 2 experts", 50, 300, ["law-M-150", "[code]-M-150"])
        progress.said("[code]-M-150: killed by signal 9; taken up again")
        progress.training("seed 1, 2 experts", 150, 300, ["[code]-M-150"])
    return stream.getvalue()


def test_a_terminal_gets_a_bar_with_who_is_at_work_and_lines_above_it() -> None:
    text = shown(Terminal())
    assert "150/300 steps" in text and "seed 1, 2 experts: [code]-M-150" in text
    assert "[code]-M-150: killed by signal 9; taken up again" in text


def test_anything_else_gets_the_lines_alone() -> None:
    assert shown(io.StringIO()) == "[code]-M-150: killed by signal 9; taken up again\n"


def test_quiet_is_quiet() -> None:
    assert shown(io.StringIO(), quiet=True) == ""
