"""Questions from files: the reference is what stands after the mark, and a number is a number however it is spelt."""

from __future__ import annotations

import gzip
import json
import random
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opening import opened

from planaria.common.errors import UserError
from planaria.swarm.tasks import open_task, records
from planaria.swarm.tasks.answers import BRACKETS, TAGS, same_answer
from planaria.swarm.tasks.jsonl import Questions
from planaria.swarm.tasks.sums import Sums

LINES = [
    {"question": "Two ducks lay 3 eggs each. How many?", "answer": "2 * 3 = <<2*3=6>>6 eggs.\n#### 6"},
    {"question": "What is half of $2,468?", "answer": "Half of it is $1,234.\n#### 1,234"},
    {"question": "Which is larger, 2 or 3?", "answer": "[3] is.\n#### three"},
]
any_text = st.text(st.characters(exclude_categories=()))


def written(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "ducks.jsonl", LINES)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
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
    ],
)
def test_the_same_answer_in_another_spelling_is_right(reference: str, answer: str) -> None:
    assert same_answer(reference, answer)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("18", "18 eggs"),
        ("18", "the answer is 18"),
        ("18", "18 18"),
        ("18", "18" + " " * 100 + "7"),
        ("18", "1,8"),
        ("18", "１８"),
        ("18", "18e0"),
        ("16", "0x10"),
        ("18", "1_8"),
        ("18", "NaN"),
        ("18", ""),
        ("0", "."),
        ("0", ""),
        ("0", "$%"),
        ("18", "--18"),
        ("18", "18.0.0"),
        ("1234", "12,34"),
        ("1234", ",1,234"),
        ("1000", "1,00,0"),
        ("18", "18" + "0" * 100_000),
        ("18", "18." + "0" * 100_000),
        ("0.1", "0.1000000000000000055511151231257827"),
        ("three", "Three"),
        ("three", "3"),
    ],
)
def test_anything_else_is_wrong(reference: str, answer: str) -> None:
    assert not same_answer(reference, answer)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=3))
def test_separators_and_signs_never_change_a_number(value: object) -> None:
    assert same_answer(f"{value}", f"{value:,}0")


def test_problems_come_in_the_order_of_the_file_and_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    lines = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(25)]
    task = opened(f"jsonl:{written(tmp_path / 'n.jsonl', lines)}")
    assert (task.training, task.held_out) == (23, 2)
    assert [task.problem(n).answer for n in range(25)] == [str(n) for n in range(25)]
    for number in (-1, 25):
        with pytest.raises(ValueError, match="no problem"):
            task.problem(number)


@pytest.mark.parametrize("kind", ["jsonl", "gsm8k"])
def test_a_folder_is_split_by_its_files(tmp_path: Path, kind: str) -> None:
    written(tmp_path / "train-a.jsonl", LINES[:2])
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(json.dumps(LINES[2]).encode()))
    (tmp_path / "notes.txt").write_text("no problem")
    task = opened(f"{kind}:{tmp_path}")
    assert (task.training, task.held_out) == (2, 1)
    assert task.problem(2).answer == "three"
    assert task.name == f"{kind}:{tmp_path}"


@pytest.mark.parametrize("style", ["tags", "brackets"])
def test_worked_answers_score_in_the_form_of_the_style(file: Path, style: str) -> None:
    task = opened(f"jsonl:{file}", style)
    for number in range(2):
        problem = task.problem(number)
        text = task.solution(problem, random.Random(0))
        assert text is not None
        assert task.score(problem, text) == 1
        assert task.score(task.problem(1 - number), text) == 0
        assert task.sound(problem, text) is None
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

    def _records(self) -> tuple[list[records.Record], list[records.Record]]:
        found = [records.Record("here", line) for line in LINES]
        return found[:2], found[2:]


@given(any_text, any_text)
def test_no_text_raises(reasoning: str, answer: str) -> None:
    task = Ducks()
    for text in (answer, TAGS.write(reasoning, answer)):
        assert task.score(task.problem(0), text) in (0.0, 1.0)


def test_the_fingerprint_follows_what_is_asked_and_how_it_is_scored(tmp_path: Path, file: Path) -> None:
    elsewhere = written(tmp_path / "copy.jsonl", LINES)
    changed = written(tmp_path / "changed.jsonl", [LINES[0] | {"answer": "#### 7"}, *LINES[1:]])
    same = {opened(f"jsonl:{path}").fingerprint for path in (file, elsewhere)}
    assert len(same) == 1
    assert len(same | {opened(f"jsonl:{changed}").fingerprint, opened(f"jsonl:{file}", "brackets").fingerprint}) == 3


@pytest.mark.parametrize(
    ("line", "mend"),
    [
        (b'{"question": "1?", "answer": "1"}', r"ducks.jsonl:4: field 'answer' has no '#### ANSWER'"),
        (b'{"question": "1?", "answer": "1 #### "}', r"ducks.jsonl:4: field 'answer' has no '#### ANSWER'"),
        (b'{"question": "1?"}', r"ducks.jsonl:4: no field 'answer'.*mend or remove the line"),
        (
            b'{"question": [1], "answer": "#### 1"}',
            r"ducks.jsonl:4: field 'question' holds list, neither text nor a number",
        ),
        (b'{"question": ', r"ducks.jsonl:4: not a JSON record"),
        (b"[1]", r"ducks.jsonl:4: holds a JSON list"),
        (b"\xff", r"ducks.jsonl:4: not a JSON record"),
        (b"[" * 100_000, r"ducks.jsonl:4: not a JSON record"),
        (b" " * (records.MAX_LINE_BYTES + 1), r"ducks.jsonl:4: longer than 1048576 bytes"),
    ],
)
def test_a_bad_line_is_named(file: Path, line: bytes, mend: str) -> None:
    file.write_bytes(file.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=mend):
        opened(f"jsonl:{file}")


def test_halves_of_surrogate_pairs_do_not_get_in(file: Path) -> None:
    file.write_text('{"question": "\\ud800?", "answer": "#### \\udc00"}\n' * 2)
    task = opened(f"jsonl:{file}")
    assert task.problem(0).prompt == "??\n"


def test_too_much_too_little_and_nothing_are_answered(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"none.jsonl:1: cannot be read"):
        opened(f"jsonl:{tmp_path / 'none.jsonl'}")
    with pytest.raises(UserError, match=r"holds no train\*.jsonl"):
        opened(f"gsm8k:{tmp_path}")
    with pytest.raises(UserError, match="too few problems"):
        opened(f"jsonl:{written(tmp_path / 'one.jsonl', LINES[:1])}")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-9])
    with pytest.raises(UserError, match="cannot be read"):
        opened(f"jsonl:{tmp_path / 'cut.jsonl.gz'}")
    monkeypatch.setattr(records, "MAX_BYTES", 100)
    with pytest.raises(UserError, match=r"ducks.jsonl:2: more than 100 bytes"):
        opened(f"jsonl:{file}")


def test_gsm8k_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(UserError, match=r"no network.*give task\.options\.path"):
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


def questions(tmp_path: Path, *lines: object, **options: object) -> Questions:
    return Questions(path=str(written(tmp_path / "own.jsonl", list(lines))), **options)  # type: ignore[arg-type]


def test_fields_may_have_any_names_be_joined_lie_within_others_and_hold_numbers(tmp_path: Path) -> None:
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
def test_numbers_are_written_out_as_answers_are_read(tmp_path: Path, number: float, text: str) -> None:
    line = {"question": "?", "answer": number}
    task = questions(tmp_path, line, line)
    assert task.problem(0).answer == text and task.score(task.problem(0), TAGS.write("", text)) == 1


def test_without_a_mark_all_of_the_field_is_the_answer(tmp_path: Path) -> None:
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
        ({"question": "x", "answer": "4"}, {}, r"has no '#### ANSWER'.*or write task.options.mark = ''"),
        ({"question": "x", "answer": "  "}, {"mark": ""}, r"field 'answer' is empty"),
    ],
)
def test_what_is_wrong_with_a_field_is_named(
    tmp_path: Path, line: object, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        questions(tmp_path, line, line, **options)


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
