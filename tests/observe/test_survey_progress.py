from __future__ import annotations

import io

from planaria.observe.live.survey_progress import SurveyProgress


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
