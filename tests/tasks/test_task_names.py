"""A task's name opens it, and a mistaken one says what was meant."""

from __future__ import annotations

import pytest

from planaria.errors import UserError
from planaria.tasks.registry import open_task


@pytest.mark.parametrize("name", ["sums", "sums:3"])
def test_a_task_knows_its_name(name: str) -> None:
    assert open_task(name).name == name


def test_a_style_changes_what_is_written_and_nothing_else() -> None:
    columns, words = open_task("sums"), open_task("sums", "words")
    assert columns.fingerprint == words.fingerprint
    assert columns.problem(5) == words.problem(5)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("sum", "did you mean 'sums'"),
        ("", "known here"),
        ("sums:", "ends in a colon"),
        ("sums:two", "write 'sums:3' for three"),
        ("sums:²", "write 'sums:3' for three"),
        ("jsonl", "write 'jsonl:PATH'"),
        ("programs", "write 'programs:PATH'"),
        ("gsm8", "did you mean 'gsm8k'"),
        ("sums:99", "'sums:2' to 'sums:18'"),
    ],
)
def test_mistaken_names_are_answered(name: str, mend: str) -> None:
    with pytest.raises(UserError, match=mend):
        open_task(name)


def test_a_style_of_another_task_is_answered() -> None:
    for name, mend in (("sums", "did you mean|known here"), ("jsonl:x", "known"), ("programs:x", "leave it out")):
        with pytest.raises(UserError, match=mend):
            open_task(name, "prose")
