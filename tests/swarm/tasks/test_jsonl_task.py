"""Questions from files: references follow the mark, and numbers are compared by value."""

from __future__ import annotations

import gzip
import json
import random
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import BRACKETS, TAGS, same_answer
from planaria.swarm.tasks.jsonl import Questions
from support.swarm.task_builders import check_solutions, opened, written

LINES = [
    {"question": "Two ducks lay 3 eggs each. How many?", "answer": "2 * 3 = <<2*3=6>>6 eggs.\n#### 6"},
    {"question": "What is half of $2,468?", "answer": "Half of it is $1,234.\n#### 1,234"},
    {"question": "Which is larger, 2 or 3?", "answer": "[3] is.\n#### three"},
]
any_text = st.text(st.characters(exclude_categories=()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "ducks.jsonl", *LINES)


SAME = [
    ("18", "18"),
    ("18", " $18.00\n"),
    ("18", "18" + " " * 100),
    ("18", "18."),
    ("18", "+18"),
    ("18", "018"),
    ("1,234", "1234"),
    ("1234567", "1,234,567"),
    ("-3", "-$3"),
    ("50", "50%"),
    (".5", "0.50"),
    ("0", "-0"),
    ("three", "three "),
    ("0.1", "0.1000000000000000000000000000000000000000"),
]
DIFFERENT = [
    *(
        ("18", answer)
        for answer in ("18 eggs", "the answer is 18", "18 18", "18" + " " * 100 + "7", "1,8", "１８", "18e0")
    ),
    *(("18", answer) for answer in ("1_8", "NaN", "", "--18", "18.0.0", "18" + "0" * 100_000, "18." + "0" * 100_000)),
    ("16", "0x10"),
    ("0", "."),
    ("0", ""),
    ("0", "$%"),
    ("1234", "12,34"),
    ("1234", ",1,234"),
    ("1000", "1,00,0"),
    ("0.1", "0.1000000000000000055511151231257827"),
    ("three", "Three"),
    ("three", "3"),
]


@pytest.mark.parametrize(
    ("reference", "answer", "same"), [*((*pair, True) for pair in SAME), *((*pair, False) for pair in DIFFERENT)]
)
def test_answers_are_compared_by_value(reference: str, answer: str, same: bool) -> None:
    assert same_answer(reference, answer) is same


def test_problems_keep_the_file_s_order_and_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    lines = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(25)]
    task = opened(f"jsonl:{written(tmp_path / 'n.jsonl', *lines)}")
    assert (task.training, task.held_out) == (23, 2)
    assert [task.problem(n).answer for n in range(25)] == [str(n) for n in range(25)]


@pytest.mark.parametrize("kind", ["jsonl", "gsm8k"])
def test_a_folder_is_split_by_file_names(tmp_path: Path, kind: str) -> None:
    written(tmp_path / "train-a.jsonl", *LINES[:2])
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(json.dumps(LINES[2]).encode()))
    (tmp_path / "notes.txt").write_text("no problem")
    task = opened(f"{kind}:{tmp_path}")
    assert (task.training, task.held_out) == (2, 1)
    assert task.problem(2).answer == "three"
    assert task.name == f"{kind}:{tmp_path}"


@pytest.mark.parametrize("style", ["tags", "brackets"])
def test_worked_answers_score_in_the_form_of_the_style(file: Path, style: str) -> None:
    task = opened(f"jsonl:{file}", style)
    check_solutions(task)
    assert (task.solution(task.problem(2), random.Random(0)) is None) == (style == "brackets")


def test_only_the_answer_block_is_scored(file: Path) -> None:
    task = opened(f"jsonl:{file}")
    problem = task.problem(0)
    assert task.score(problem, TAGS.write("2+2=5", " 6.0 ")) == 1
    assert task.score(problem, TAGS.write("6", "7")) == 0
    assert task.score(problem, TAGS.write("so", "6 or 7")) == 0
    assert task.score(problem, BRACKETS.write("so", "6")) == 0
    assert task.score(problem, "#### 6") == 0


class Ducks(Questions):
    path: str = ""

    def _records(self) -> tuple[list[records.TaskRecord], list[records.TaskRecord]]:
        found = [records.TaskRecord("here", line) for line in LINES]
        return found[:2], found[2:]


@given(any_text, any_text)
def test_no_text_raises(reasoning: str, answer: str) -> None:
    task = Ducks()
    for text in (answer, TAGS.write(reasoning, answer)):
        assert task.score(task.problem(0), text) in (0.0, 1.0)


def test_the_fingerprint_depends_on_content_and_style(tmp_path: Path, file: Path) -> None:
    elsewhere = written(tmp_path / "copy.jsonl", *LINES)
    changed = written(tmp_path / "changed.jsonl", LINES[0] | {"answer": "#### 7"}, *LINES[1:])
    same = {opened(f"jsonl:{path}").fingerprint for path in (file, elsewhere)}
    assert len(same) == 1
    assert len(same | {opened(f"jsonl:{changed}").fingerprint, opened(f"jsonl:{file}", "brackets").fingerprint}) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "1?", "answer": "1 #### "}', r"ducks.jsonl:4: field 'answer' has no '#### ANSWER'"),
        (b'{"question": "1?"}', r"ducks.jsonl:4: no field 'answer'.*fix or remove the line"),
        (b'{"question": ', r"ducks.jsonl:4: not a JSON record"),
        (b"[1]", r"ducks.jsonl:4: a JSON list"),
        (b"\xff", r"ducks.jsonl:4: not a JSON record"),
        (b"[" * 100_000, r"ducks.jsonl:4: not a JSON record"),
        (b" " * (records.MAX_LINE_BYTES + 1), r"ducks.jsonl:4: more than 1 MiB"),
    ],
)
def test_an_invalid_line_is_reported_with_its_place(file: Path, line: bytes, message: str) -> None:
    file.write_bytes(file.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=message):
        opened(f"jsonl:{file}")


def test_lone_surrogates_are_replaced(file: Path) -> None:
    file.write_text('{"question": "\\ud800?", "answer": "#### \\udc00"}\n' * 2)
    task = opened(f"jsonl:{file}")
    assert task.problem(0).prompt == "??\n"


def test_missing_empty_and_oversized_files_are_reported(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"none.jsonl:1: unreadable"):
        opened(f"jsonl:{tmp_path / 'none.jsonl'}")
    with pytest.raises(UserError, match=r"contains no train\*.jsonl"):
        opened(f"gsm8k:{tmp_path}")
    with pytest.raises(UserError, match="too few problems"):
        opened(f"jsonl:{written(tmp_path / 'one.jsonl', LINES[0])}")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-9])
    with pytest.raises(UserError, match="unreadable"):
        opened(f"jsonl:{tmp_path / 'cut.jsonl.gz'}")
    monkeypatch.setattr(records, "MAX_BYTES", 100)
    with pytest.raises(UserError, match=r"ducks.jsonl:2: more than 100 bytes"):
        opened(f"jsonl:{file}")


def test_gsm8k_is_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, configuration: str, split: str) -> list[dict[str, str]]:
        assert (name, configuration) == ("openai/gsm8k", "main")
        return LINES[:2] if split == "train" else LINES[2:]

    errors = types.SimpleNamespace(DatasetsError=RuntimeError)
    hub = types.SimpleNamespace(load_dataset=load_dataset, exceptions=errors)
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    task = opened("gsm8k")
    assert (task.name, task.training, task.held_out) == ("gsm8k", 2, 1)

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    hub.load_dataset = unreachable
    with pytest.raises(UserError, match=r"no network.*set task\.options\.path"):
        opened("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'planaria\[hub\]'"):
        opened("gsm8k")


@pytest.mark.slow
def test_every_worked_answer_of_gsm8k_scores(shared_data: Path) -> None:
    task = opened(f"gsm8k:{shared_data / 'gsm8k'}")
    assert (task.training, task.held_out) == (7473, 1319)
    for number in range(0, 8792, 7):
        problem = task.problem(number)
        text = task.solution(problem, random.Random(0))
        assert text is not None
        assert task.score(problem, text) == 1


def questions(tmp_path: Path, *lines: Mapping[str, object], **options: str) -> Questions:
    return Questions(path=str(written(tmp_path / "own.jsonl", *lines)), **options)


def test_fields_can_be_renamed_joined_and_nested(tmp_path: Path) -> None:
    svamp = {"Body": "There are 3 hens.", "Question": "How many legs?", "Answer": 6.0, "Equation": "( 3 * 2 )"}
    names = {"question_field": "Body+Question", "answer_field": "Answer", "worked_field": "Equation"}
    task = questions(tmp_path, svamp, svamp, **names)
    assert task.problem(0).prompt == "There are 3 hens. How many legs?\n" and task.problem(0).answer == "6"
    assert task.solution(task.problem(0), random.Random()) == TAGS.write("( 3 * 2 )", "6")
    nested = {"q": {"text": "1+1?"}, "a": [{"value": 2}]}
    task = questions(tmp_path, nested, nested, question_field="q.text", answer_field="a.0.value")
    assert task.problem(1).answer == "2"


@pytest.mark.parametrize(
    ("number", "text"), [(8.0, "8"), (0.5, "0.5"), (-3, "-3"), (1e21, "1" + "0" * 21), (10**25, str(10**25))]
)
def test_numbers_are_written_out_as_answers(tmp_path: Path, number: float, text: str) -> None:
    line = {"question": "?", "answer": number}
    task = questions(tmp_path, line, line)
    assert task.problem(0).answer == text and task.score(task.problem(0), TAGS.write("", text)) == 1


def test_without_a_mark_the_whole_field_is_the_answer(tmp_path: Path) -> None:
    line = {"question": "Capital of France?", "answer": " Paris "}
    assert questions(tmp_path, line, line, mark="").problem(0).answer == "Paris"
    marked = {"question": "?", "answer": "so it is ANSWER: 4"}
    assert questions(tmp_path, marked, marked, mark="ANSWER:").problem(0).answer == "4"


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"Body": "x", "answer": 1}, {"question_field": "Body+Question"}, r"own.jsonl:1: no field 'Question' \("),
        ({"q": {"t": "x"}, "answer": 1}, {"question_field": "q.text"}, r"own.jsonl:1: no field 'q.text' \("),
        ({"question": ["x"], "answer": 1}, {}, r"field 'question' holds list, neither text nor a number"),
        ({"question": "x", "answer": True}, {}, r"field 'answer' holds bool"),
        ({"question": "x", "answer": float("inf")}, {}, r"field 'answer' holds float"),
        ({"question": "x", "answer": "4"}, {}, r"has no '#### ANSWER'.*or set task.options.mark = ''"),
        ({"question": "x", "answer": "  "}, {"mark": ""}, r"field 'answer' is empty"),
    ],
)
def test_an_invalid_field_is_reported(
    tmp_path: Path, line: dict[str, object], options: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        questions(tmp_path, line, line, **options)
