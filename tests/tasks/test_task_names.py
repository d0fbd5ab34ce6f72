"""A task's name opens it, and a mistaken one says what was meant."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.swarm.tasks import open_task
from planaria.swarm.tasks.sums import Sums

OWN = """
from planaria.swarm.tasks.sums import Sums

class Mine(Sums):
    bonus: int = 0
"""


@pytest.mark.parametrize(("digits", "name"), [(2, "sums"), (3, "sums:3")])
def test_a_task_has_a_name_for_people(digits: int, name: str) -> None:
    assert open_task("sums", {"digits": digits}).name == name


def test_a_style_changes_what_is_written_and_nothing_else() -> None:
    columns, words = open_task("sums", {}), open_task("sums", {"style": "words"})
    assert columns.fingerprint == columns.identity == words.fingerprint
    assert columns.problem(5) == words.problem(5)


@pytest.mark.parametrize(
    ("name", "options", "mend"),
    [
        ("sum", {}, "task.name = 'sum': no such choice; did you mean 'sums'"),
        ("", {}, "known here"),
        ("sums:3", {}, "task.name = 'sums:3': write 'sums', and '3' as one of its options: digits, style"),
        ("gsm8k:folder", {}, "write 'gsm8k', and 'folder' as one of its options: path, style"),
        ("sums", {"digits": "two"}, "task.options.digits = 'two': Input should be a valid integer"),
        ("sums", {"digit": 2}, "task.options.digit: no option of 'sums'; did you mean 'digits'"),
        ("jsonl", {}, "task.options.path: .*has no default for it"),
        ("programs", {}, "task.options.path: .*has no default for it"),
        ("programs", {"path": "x", "style": "tags"}, "task.options.style: no option of 'programs'"),
    ],
)
def test_mistakes_are_answered(name: str, options: dict[str, object], mend: str) -> None:
    with pytest.raises(UserError, match=mend):
        open_task(name, options)


@pytest.mark.usefixtures("allow_code")
def test_the_identity_of_ones_own_task_is_its_options_and_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"task_of_ones_own_{random.Random(str(tmp_path)).randrange(10**9)}"
    (tmp_path / f"{name}.py").write_text(OWN)
    mine = open_task(f"{name}:Mine", {})
    before = mine.identity
    assert mine.fingerprint == Sums().fingerprint != before
    (tmp_path / f"{name}.py").write_text(OWN.replace("0", "1234"))
    assert open_task(f"{name}:Mine", {}).identity != before
