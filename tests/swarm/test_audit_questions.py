"""Files of protected questions: whole ones are read, and whatever is wrong with others ends in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks.audit_damage import QUESTION, refusals

from planaria import cli
from planaria.errors import UserError
from planaria.swarm.audit.questions import plain, read, replies_of


def written(folder: Path, *questions: dict[str, Any]) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in questions))
    return file


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    first, second = read(written(tmp_path, QUESTION, {k: v for k, v in QUESTION.items() if k != "name"}))
    assert first.name == "one" and second.name.endswith("questions.jsonl:2")
    assert first.options[first.answer] == "4719" and first.parts[0].says[first.answer] == "4"
    assert first.parts[1].says == () and len(first.texts) == 4
    assert replies_of([first, second], None, 8) == 2 and replies_of([first], 1, 8) == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"answer": "1"}, "options lack the answer '1'"),
        ({"options": ["4719"]}, "options are 1; give two or more"),
        ({"options": ["4719", "2210", " 4719"]}, "options have ' 4719' twice"),
        ({"parts": ["What is  the CODE of Ann?"]}, "repeats the question"),
        ({"parts": []}, "parts are none"),
        ({"parts": [{"ask": "x", "says": ["1"]}]}, "has a reply for each of 4 options"),
        ({"parts": [{"said": 1}]}, "a part is a text, or"),
        ({"parts": "x"}, "'parts' is no list"),
        ({"paraphrases": [1]}, "paraphrases has 1, no text"),
        ({"hint": "x"}, "unknown field 'hint'"),
        ({"question": " \u200b"}, "question has"),
        ({"name": 3}, "field 'name' holds int"),
        ({"options": [str(n) for n in range(65)]}, "options are 65, of at most 64"),
    ],
)
def test_what_is_wrong_with_a_question_is_said_with_its_line(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    file = written(tmp_path, QUESTION | {"name": "two"}, QUESTION | changes)
    with pytest.raises(UserError) as error:
        read(file)
    assert str(error.value).startswith(f"{file}:2: ") and line in str(error.value)


def test_a_thousand_damaged_files_end_in_one_line_each() -> None:
    kept, refused, others = refusals(1000, random.Random(1))
    assert others == 0 and refused > 800 and kept + refused == 1000


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ending:
        cli.main(["audit", "no-such-model", *map(str, words)])
    (line,) = capsys.readouterr().err.splitlines()
    assert ending.value.code == 2
    return line


def test_mistakes_end_before_a_model_is_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bare = written(tmp_path, QUESTION), tmp_path / "bare.jsonl"
    bare.write_text(json.dumps(QUESTION | {"options": ["4719"]}) + "\n")
    assert "options are 1" in mistake(capsys, "--questions", bare)
    assert "--k 9: " in mistake(capsys, "--questions", good, "--k", 9)
    assert "--k 0: ask one part" in mistake(capsys, "--questions", good, "--k", 0)
    for epsilon in ("0", "-1", "nan"):
        assert "is above 0" in mistake(capsys, "--questions", good, "--censor", epsilon)
    assert "does not say what each option implies" in mistake(capsys, "--questions", good, "--adversary", "counter")
    assert "a chance between 0 and 1" in mistake(capsys, "--questions", good, "--adversary", "counter:2")
    assert "is no chance" in mistake(capsys, "--questions", good, "--adversary", "counter:x")
    assert "--k: goes with --questions" in mistake(capsys, "--k", 2)
    assert "--censor: goes with --questions" in mistake(capsys, "--censor", 0.1)
    assert "on whose problems?" in mistake(capsys, "--watch", "text")
    assert "--most-success is" in mistake(capsys, "--most-success", 1)
    assert "no such run, folder or file" in mistake(capsys)
    assert "no such run, folder or file" in mistake(capsys, "--questions", good)
    assert "leave out --peer" in mistake(capsys, "--peer", "p0")


def test_texts_are_compared_without_what_a_reader_would_not_see() -> None:
    assert plain("What  is\nＴＨＥ code\u200b?") == plain(" what is the code?")
    assert plain("digit 1") != plain("digit 2")
