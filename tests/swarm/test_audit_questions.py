"""Files of protected questions: whole ones are read, and whatever is wrong with others ends in one line."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.audit_damage import QUESTION, refusals
from hypothesis import given
from hypothesis import strategies as st

from planaria import cli
from planaria.common.errors import UserError
from planaria.swarm.audit.questions import INVISIBLE, closed_up, plain, read, replies_of


def written(folder: Path, *questions: dict[str, Any]) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in questions))
    return file


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    other = QUESTION | {"question": "What is the code of Bob?", "paraphrases": []}
    first, second = read(written(tmp_path, QUESTION, {k: v for k, v in other.items() if k != "name"}))
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"question": "what\u3164 is the code of  ANN ?", "paraphrases": []},
        {"question": "Ann's c\u00adode , please", "paraphrases": []},
        {"question": "Which?", "paraphrases": ["Ann's\ufe0fcode,please"]},
    ],
)
def test_a_question_that_is_there_twice_is_refused_with_both_places(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = written(tmp_path, QUESTION, QUESTION | {"name": "two"} | changes)
    with pytest.raises(UserError) as error:
        read(file)
    assert str(error.value).startswith(f"{file}:2: 'two' asks the same as 'one' ({file}:1); ")


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
    assert plain("digit 1") != plain("digit 2") and plain("1 2") != plain("12")
    assert plain("a =") == plain("a\u180b = ") == "a=" and plain("\u115f\u17b4") == ""


def test_invisible_characters_are_those_of_the_unicode_standard() -> None:
    standard = pytest.importorskip("regex").compile(r"\p{Default_Ignorable_Code_Point}")
    every = "".join(map(chr, range(0x110000)))
    assert INVISIBLE.findall(every) == standard.findall(every)


UNSEEN = st.sampled_from(
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b\u200b\u200d\u2060\u3164\ufe0f\ufeff\uffa0\U000e0100\x00"
)
SPACES = st.sampled_from(" \t\n\x1f\x85\u00a0\u2003\u2028\u202f\u3000")
TEXTS = st.text(st.sampled_from("aB1=.é\u0301ﬁＡß漢\u1100\u1161 ") | st.characters(codec="utf-8"), max_size=12)


def inserted(text: str, more: Sequence[tuple[int, str]]) -> str:
    for place, one in more:
        text = text[: place % (len(text) + 1)] + one + text[place % (len(text) + 1) :]
    return text


@given(TEXTS, st.lists(st.tuples(st.integers(0, 99), UNSEEN), max_size=6))
def test_no_invisible_character_changes_a_normal_form(text: str, more: list[tuple[int, str]]) -> None:
    assert plain(inserted(text, more)) == plain(text) == plain(plain(text))


@given(TEXTS, st.lists(st.tuples(st.integers(0, 99), UNSEEN | SPACES), max_size=6))
def test_no_spacing_changes_what_a_censor_looks_for(text: str, more: list[tuple[int, str]]) -> None:
    assert closed_up(inserted(text, more)) == closed_up(text) == closed_up(closed_up(text))
