"""Lines that repeat themselves are counted, and nothing is lost from the count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.report.run.event_lines import Repeats


def shown(repeats: Repeats, times: list[float], subject: str = "link") -> list[str]:
    return [line for t in times if (line := repeats.limit(t, subject, f"at {t:g}")) is not None]


def test_the_first_lines_of_a_window_are_shown_and_the_next_window_tells_of_the_rest() -> None:
    repeats = Repeats(shown=2, window_s=10)
    assert shown(repeats, [0, 1, 2, 3, 12]) == ["at 0", "at 1", "at 12 (2 more in 10 s not shown)"]
    assert shown(repeats, [13, 25, 31]) == ["at 13"], "the next window is twice as long"
    assert repeats.rest() == "link: 2 more in 20 s not shown"


def test_subjects_do_not_disturb_one_another_and_a_quiet_one_is_never_held_back() -> None:
    repeats = Repeats(shown=1, window_s=10)
    assert shown(repeats, [0, 1, 2]) == ["at 0"]
    assert shown(repeats, [0, 20, 40, 60], "worker") == ["at 0", "at 20", "at 40", "at 60"]
    assert repeats.rest() == "link: 2 more in 10 s not shown"


@given(st.lists(st.floats(0, 1000), max_size=60).map(sorted), st.integers(1, 4))
def test_every_line_is_shown_or_counted(times: list[float], most: int) -> None:
    repeats = Repeats(shown=most, window_s=30)
    lines = shown(repeats, times)
    counted = sum(int(line.partition("(")[2].split()[0]) for line in lines if "(" in line)
    rest = repeats.rest()
    assert len(lines) + counted + (int(rest.split()[1]) if rest else 0) == len(times)
