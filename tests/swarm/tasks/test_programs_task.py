"""Programs from three kinds of files: what is right is what runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opening import opened

from planaria.common.errors import UserError
from planaria.swarm.tasks import sandbox
from planaria.swarm.tasks.base import Task
from planaria.swarm.tasks.programs import Programs, program_of
from planaria.swarm.tasks.sandbox import protections

pytestmark = pytest.mark.skipif("seccomp" not in protections(), reason="no seccomp: programs are not run here at all")
ASSERTS = {
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n    return Two * x",
    "test_setup_code": "Two = 2",
    "test_list": ["assert double(3) == 6", "assert double(-1) == -2"],
}
CHECK = {
    "prompt": 'def half(x):\n    """ Half of x. """\n',
    "entry_point": "half",
    "canonical_solution": "    return x / 2\n",
    "test": "def check(candidate):\n    assert candidate(3) == 1.5\n",
}
PRINTS = {"question": "What is 1000 + 234?", "expected_answer": "1,234"}


def written(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return opened(f"programs:{written(tmp_path / 'three.jsonl', ASSERTS, CHECK, PRINTS)}")


def block(program: str) -> str:
    return f"So it goes.\n```python\n{program}\n```"


def test_the_prompt_says_what_is_wanted(task: Task) -> None:
    asked = "Write a function to double a number.\nIt must pass: assert double(3) == 6\n"
    assert [task.problem(n).prompt for n in range(3)] == [asked, CHECK["prompt"], "What is 1000 + 234?\n"]
    assert (task.training, task.held_out) == (2, 1)
    for number in (-1, 3):
        with pytest.raises(ValueError, match="no problem"):
            task.problem(number)


def test_the_file_s_own_programs_score(task: Task) -> None:
    for number in range(2):
        problem = task.problem(number)
        text = task.solution(problem, random.Random(0))
        assert text is not None
        assert task.score(problem, text) == 1
        assert task.score(task.problem(1 - number), text) == 0
        assert task.sound(problem, text) is None
    assert task.solution(task.problem(2), random.Random(0)) is None


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("print(1234)", 1),
        ("print('first')\nprint('$1234.0 ')\nprint()", 1),
        ("print(1234)\nprint('done')", 0),
        ("print(1234)\n1 / 0", 0),
        ("1234", 0),
        ("if __name__ == '__main__':\n    print(1234)\n    raise SystemExit", 1),
    ],
)
def test_the_last_printed_line_is_the_answer(task: Task, program: str, score: float) -> None:
    assert task.score(task.problem(2), block(program)) == score


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("def double(x): return x + x", 1),
        ("def double(x): return 6", 0),
        ("def double(x): return x +", 0),
        ("double = None", 0),
        ("raise SystemExit", 0),
    ],
)
def test_every_test_counts(task: Task, program: str, score: float) -> None:
    assert task.score(task.problem(0), block(program)) == score


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def double(x): return 2 * x",
        "```\nx\n```",
        "```py\nx\n```",
        "```python\nx",
        "```python x\n```",
        "```python\nx\n```\nso",
        "```python\nx\n```\n```python\nx\n```",
        "```python\nx\n````",
        "```python\n```x\n```",
        " ```python\nx\n ```",
        "```\nx\n```python",
    ],
)
def test_a_completion_without_exactly_one_program_at_its_end_has_none(text: str) -> None:
    assert program_of(text) is None


def test_a_program_is_taken_to_the_letter() -> None:
    assert program_of("so ```\n```python \n\n  x = '```'\n\n``` \n\n") == "\n  x = '```'\n"
    assert program_of("```python\n```") == ""


@given(st.text(st.characters(exclude_categories=())), st.text(st.sampled_from("`python\n x")))
def test_no_text_raises(text: str, fenced: str) -> None:
    for completion in (text, fenced, block(text)):
        program = program_of(completion)
        assert program is None or program in completion


def test_a_score_is_given_within_the_limits(tmp_path: Path) -> None:
    path = written(tmp_path / "three.jsonl", ASSERTS, CHECK, PRINTS)
    task = Programs(path=str(path), seconds=0.3)
    assert task.score(task.problem(0), block("while True: pass")) == 0
    assert task.fingerprint != Programs(path=str(path)).fingerprint


def test_the_fingerprint_follows_the_tests_and_not_the_place(tmp_path: Path, task: Task) -> None:
    elsewhere = written(tmp_path / "copy.jsonl", ASSERTS, CHECK, PRINTS)
    changed = written(tmp_path / "changed.jsonl", ASSERTS | {"test_list": ["assert 1"]}, CHECK, PRINTS)
    assert opened(f"programs:{elsewhere}").fingerprint == task.fingerprint
    assert opened(f"programs:{changed}").fingerprint != task.fingerprint


@pytest.mark.parametrize(
    ("line", "mend"),
    [
        ({"text": "Do."}, r"bad.jsonl:3: no field of test_list, calls, entry_point, expected_answer"),
        (ASSERTS | {"test_list": []}, r"bad.jsonl:3: field 'test_list' is no list of tests"),
        (ASSERTS | {"test_list": [1]}, r"bad.jsonl:3: field 'test_list' is no list of tests"),
        ({"test_list": ["assert 1"]}, r"bad.jsonl:3: no field 'text'"),
        ({"entry_point": "f", "prompt": "def f"}, r"bad.jsonl:3: no field 'test'"),
        ({"expected_answer": 3, "question": "3?"}, r"bad.jsonl:3: field 'expected_answer' holds int, not text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, object], mend: str) -> None:
    path = written(tmp_path / "bad.jsonl", ASSERTS, CHECK, line)
    with pytest.raises(UserError, match=mend):
        opened(f"programs:{path}")


def test_without_a_cage_no_program_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "protections", lambda: ())
    with pytest.raises(UserError, match="only be locked up on Linux"):
        opened(f"programs:{tmp_path}")


@pytest.mark.slow
def test_the_programs_of_mbpp_and_humaneval_pass(shared_data: Path) -> None:
    for name, count in (("mbpp/mbpp.jsonl", 974), ("humaneval/HumanEval.jsonl.gz", 164)):
        task = opened(f"programs:{shared_data / name}")
        assert task.training + task.held_out == count
        for number in range(0, count, count // 8):
            problem = task.problem(number)
            text = task.solution(problem, random.Random(0))
            assert text is not None
            assert task.score(problem, text) == 1
