"""Completions have exactly one reasoning, one answer, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.tasks.answers import BRACKETS, FORMS, TAGS, AnswerMarks, Parsed, parse

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
    "marks",
    [("", "", "", "]"), ("", "", "[", ""), ("<", "", "[", "]"), ("", "", "|", "|"), ("<<", "<", "[", "]")],
)
def test_ambiguous_marks_are_rejected(marks: tuple[str, str, str, str]) -> None:
    with pytest.raises(ValueError, match="mark"):
        AnswerMarks(*marks)
