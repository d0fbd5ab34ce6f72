"""The task registry, golden problems, and behaviour that all tasks share, and answers read from texts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.tasks import open_task
from planaria.swarm.tasks.answers import BRACKETS, FORMS, TAGS, AnswerMarks, Parsed, parse
from planaria.swarm.tasks.sums import Sums
from support.swarm.task_builders import needs_sandbox, opened, written

OWN = """
from planaria.swarm.tasks.sums import Sums

class Mine(Sums):
    bonus: int = 0
"""
QUESTION = {"question": "1+1?", "answer": "#### 2", "expected_answer": "2"}


@pytest.mark.parametrize(
    ("name", "prompts", "fingerprint"),
    [
        ("codes", ["a0,c0,a1,d2,b3=", "a0,b0,b1,c1,c2,a3="], "1dd8f3637897e43c"),
        pytest.param(
            "snippets",
            ["print 94 + 99\n", "print 78 + 65 + 75\n", "print 97 + 35\n"],
            "a87a4d8fdcb8862c",
            marks=needs_sandbox,
        ),
        ("sums", ["59+59=", "51+36=", "46+21=", "23+11="], "35af54bd22c6c755"),
    ],
)
def test_problems_and_fingerprint_are_golden(name: str, prompts: list[str], fingerprint: str) -> None:
    """Peers of different releases must get the same problem; a change needs another key in the task."""
    task = open_task(name, {})
    assert [task.problem(n).prompt for n in range(len(prompts))] == prompts
    assert task.fingerprint == fingerprint


@pytest.mark.parametrize(
    "name",
    ["sums", "codes", "jsonl", "gym", *(pytest.param(name, marks=needs_sandbox) for name in ("snippets", "programs"))],
)
def test_numbers_outside_the_range_have_no_problem(name: str, tmp_path: Path) -> None:
    if name == "gym":
        pytest.importorskip("reasoning_gym")
        name = "gym:chain_sum"
    if name in ("jsonl", "programs"):
        name = f"{name}:{written(tmp_path / 'two.jsonl', QUESTION, QUESTION)}"
    task = opened(name)
    for number in (-1, task.training + task.held_out):
        with pytest.raises(ValueError, match=f"has no problem {number}"):
            task.problem(number)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sum", {}, "task.name = 'sum': no such choice; did you mean 'sums'"),
        ("", {}, "known here"),
        ("sums:3", {}, "task.name = 'sums:3': set it to 'sums', and set '3' as one of its options: digits, style"),
        ("gsm8k:folder", {}, "set it to 'gsm8k', and set 'folder' as one of its options: path, style"),
        ("sums", {"digits": "two"}, "task.options.digits = 'two': input should be a valid integer"),
        ("sums", {"digit": 2}, "task.options.digit: no option of 'sums'; did you mean 'digits'"),
        ("sums", {"style": "column"}, r"task\.options.style = 'column': .*'columns' or 'words'"),
        *(("sums", {"digits": n}, rf"task\.options\.digits = {n}: .*equal to (2|18)") for n in (0, 1, 19)),
        ("jsonl", {}, "task.options.path: .*has no default for it"),
        ("programs", {}, "task.options.path: .*has no default for it"),
        ("programs", {"path": "x", "style": "tags"}, "task.options.style: no option of 'programs'"),
        ("snippets", {"style": "columns"}, "no option of 'snippets'"),
        *(("snippets", {"library": name}, "not a library name") for name in ("fast math", "../fast", "import")),
        ("snippets", {"library": "json"}, "'json' is a module of the standard library"),
        ("codes", {"distance": 9}, "distance = 9: checks of 4 allow at most 4"),
        ("codes", {"distance": 1}, "task.options.distance = 1: .*greater than or equal to 2"),
        ("codes", {"weight": 1}, "a check 2 or more"),
        ("codes", {"shown": 8}, "shown = 8 of 8 shards leaves none"),
        ("codes", {"shown": 0}, "task.options.shown = 0"),
        ("codes", {"degree": 5}, "at most 4 checks"),
        ("codes", {"shards": 40, "data": 16}, "24 checks; the limit is 12"),
        ("codes", {"shards": 8, "data": 4, "distance": 3, "weight": 2, "degree": 1}, "no code was found|allow at most"),
        (
            "codes",
            {"shards": 12, "data": 6, "distance": 4, "weight": 3, "degree": 2},
            "no code was found in 1000 tries",
        ),
        ("codes", {"colour": 1}, "no option of 'codes'"),
    ],
)
def test_an_invalid_choice_is_reported_in_one_line(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_task(name, options)
    assert "\n" not in str(error.value)


def test_a_style_changes_the_solutions_only() -> None:
    columns, words = open_task("sums", {}), open_task("sums", {"style": "words"})
    assert columns.fingerprint == columns.identity == words.fingerprint
    assert columns.problem(5) == words.problem(5)


@pytest.mark.usefixtures("allow_code")
def test_the_identity_of_a_custom_task_covers_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"custom_task_{random.Random(str(tmp_path)).randrange(10**9)}"
    (tmp_path / f"{name}.py").write_text(OWN)
    custom = open_task(f"{name}:Mine", {})
    before = custom.identity
    assert custom.fingerprint == Sums().fingerprint != before
    (tmp_path / f"{name}.py").write_text(OWN.replace("0", "1234"))
    assert open_task(f"{name}:Mine", {}).identity != before


any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates and NULs among them
marked = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "[", "]", " ", "\n", "x", "<"]))
FORM = st.sampled_from(list(FORMS.values()))


@pytest.mark.parametrize(
    "text",
    [
        "<think>2+2=4</think><answer>4</answer>",
        "<think>2+2=4</think>\n\n<answer>4</answer>",
        " <think>2+2=4</think> <answer>4</answer>\r\n\t ",
    ],
)
def test_white_space_around_the_blocks_is_ignored(text: str) -> None:
    assert parse(TAGS, text) == Parsed("2+2=4", "4")


WRONG_TAGS = [
    "",
    "<answer>4</answer>",
    "<think>2</think>",
    "<think>2</think><answer>4</answer>!",
    "<think>2</think>so<answer>4</answer>",
    "well <think>2</think><answer>4</answer>",
    "<think>2</think><answer>4</answer><answer>4</answer>",
    "<think>2</think><think>2</think><answer>4</answer>",
    "<think>2<think>2</think><answer>4</answer>",
    "<think>2</think><answer>4</answer></answer>",
    "<answer>4</answer><think>2</think>",
    "<think>2<answer>4</answer></think>",
    "<think>2<answer></think>4</answer>",
    "<think>2</think><answer>4",
    "<THINK>2</THINK><answer>4</answer>",
    "<think>2</think><answer>4</answer>\0",
    "<think>2</think><answer>4</answer>\N{NO-BREAK SPACE}",
]
WRONG_BRACKETS = ["", "4", "[4", "4]", "]4[", "[4][4]", "[[4]]", "[4]]", "[4] so", "[4].", "[4]\0"]


@pytest.mark.parametrize(
    ("form", "text"), [*((TAGS, text) for text in WRONG_TAGS), *((BRACKETS, text) for text in WRONG_BRACKETS)]
)
def test_a_completion_of_another_shape_is_rejected(form: AnswerMarks, text: str) -> None:
    assert parse(form, text) is None


def test_without_think_marks_all_before_the_answer_is_reasoning() -> None:
    assert parse(BRACKETS, " 2+2=4;\n[ 4 ]\n") == Parsed(" 2+2=4;\n", " 4 ")
    assert parse(BRACKETS, "[]") == Parsed("", "")


@given(FORM, st.one_of(any_text, marked.map("".join)))
def test_any_text_is_parsed_into_what_would_write_it_again(form: AnswerMarks, text: str) -> None:
    parsed = parse(form, text)
    if parsed is not None:
        written = form.write(parsed.reasoning, parsed.answer)
        assert "".join(written.split()) == "".join(text.split())
        assert parse(form, written) == parsed


@given(FORM, any_text, any_text)
def test_a_written_completion_is_parsed_unless_a_part_contains_a_mark(
    form: AnswerMarks, reasoning: str, answer: str
) -> None:
    clean = not any(mark in part for mark in form.marks for part in (reasoning, answer))
    assert parse(form, form.write(reasoning, answer)) == (Parsed(reasoning, answer) if clean else None)


@pytest.mark.parametrize("form", FORMS.values())
@pytest.mark.parametrize("unit", ["\0", "\ud800", "<think>", "<answer>", "[", "]", " ", "<", "<think></think>"])
def test_huge_texts_are_parsed_in_linear_time(form: AnswerMarks, unit: str) -> None:
    assert parse(form, unit * 2_000_000) is None


@pytest.mark.parametrize(
    "marks", [("", "", "", "]"), ("", "", "[", ""), ("<", "", "[", "]"), ("", "", "|", "|"), ("<<", "<", "[", "]")]
)
def test_ambiguous_marks_are_rejected(marks: tuple[str, str, str, str]) -> None:
    with pytest.raises(ValueError, match="mark"):
        AnswerMarks(*marks)
