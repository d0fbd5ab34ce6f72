"""Programs from three kinds of files, scored by running them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.sandbox import sandbox
from planaria.swarm.tasks.base import Task
from planaria.swarm.tasks.programs import Programs, program_of
from support.swarm.task_builders import block, check_solutions, needs_sandbox, opened, written

pytestmark = needs_sandbox
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


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return opened(f"programs:{written(tmp_path / 'three.jsonl', ASSERTS, CHECK, PRINTS)}")


def test_the_prompt_shows_the_request_and_one_test(task: Task) -> None:
    prompt = "Write a function to double a number.\nIt must pass: assert double(3) == 6\n"
    assert [task.problem(n).prompt for n in range(3)] == [prompt, CHECK["prompt"], "What is 1000 + 234?\n"]
    assert (task.training, task.held_out) == (2, 1)


def test_the_file_s_own_programs_score(task: Task) -> None:
    check_solutions(task)
    assert task.solution(task.problem(2), random.Random(0)) is None


@pytest.mark.parametrize(
    ("number", "program", "score"),
    [
        (2, "print(1234)", 1),
        (2, "print('first')\nprint('$1234.0 ')\nprint()", 1),
        (2, "print(1234)\nprint('done')", 0),
        (2, "print(1234)\n1 / 0", 0),
        (2, "1234", 0),
        (2, "if __name__ == '__main__':\n    print(1234)\n    raise SystemExit", 1),
        (0, "def double(x): return x + x", 1),
        (0, "def double(x): return 6", 0),
        (0, "def double(x): return x +", 0),
        (0, "double = None", 0),
        (0, "raise SystemExit", 0),
    ],
)
def test_a_program_scores_if_all_tests_pass_or_its_last_line_is_the_answer(
    task: Task, number: int, program: str, score: float
) -> None:
    assert task.score(task.problem(number), f"So it goes.\n{block(program)}") == score


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
def test_a_completion_without_exactly_one_final_program_is_rejected(text: str) -> None:
    assert program_of(text) is None


def test_a_program_is_extracted_literally() -> None:
    assert program_of("so ```\n```python \n\n  x = '```'\n\n``` \n\n") == "\n  x = '```'\n"
    assert program_of("```python\n```") == ""


@given(st.text(st.characters(exclude_categories=())), st.text(st.sampled_from("`python\n x")))
def test_no_text_raises(text: str, fenced: str) -> None:
    for completion in (text, fenced, block(text)):
        program = program_of(completion)
        assert program is None or program in completion


def test_the_time_limit_is_an_option_and_part_of_the_fingerprint(tmp_path: Path) -> None:
    path = written(tmp_path / "three.jsonl", ASSERTS, CHECK, PRINTS)
    task = Programs(path=str(path), seconds=0.3)
    assert task.score(task.problem(0), block("while True: pass")) == 0
    assert task.fingerprint != Programs(path=str(path)).fingerprint


def test_the_fingerprint_depends_on_the_tests_and_not_on_the_path(tmp_path: Path, task: Task) -> None:
    elsewhere = written(tmp_path / "copy.jsonl", ASSERTS, CHECK, PRINTS)
    changed = written(tmp_path / "changed.jsonl", ASSERTS | {"test_list": ["assert 1"]}, CHECK, PRINTS)
    assert opened(f"programs:{elsewhere}").fingerprint == task.fingerprint
    assert opened(f"programs:{changed}").fingerprint != task.fingerprint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "Do."}, r"bad.jsonl:3: no field of test_list, calls, entry_point, expected_answer"),
        (ASSERTS | {"test_list": []}, r"bad.jsonl:3: field 'test_list' is not a list of tests"),
        (ASSERTS | {"test_list": [1]}, r"bad.jsonl:3: field 'test_list' is not a list of tests"),
        ({"test_list": ["assert 1"]}, r"bad.jsonl:3: no field 'text'"),
        ({"entry_point": "f", "prompt": "def f"}, r"bad.jsonl:3: no field 'test'"),
        ({"expected_answer": 3, "question": "3?"}, r"bad.jsonl:3: field 'expected_answer' holds int, not text"),
    ],
)
def test_an_invalid_line_is_reported_with_its_place(tmp_path: Path, line: dict[str, object], message: str) -> None:
    path = written(tmp_path / "bad.jsonl", ASSERTS, CHECK, line)
    with pytest.raises(UserError, match=message):
        opened(f"programs:{path}")


def test_without_a_cage_no_program_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "protections", lambda: ())
    with pytest.raises(UserError, match="confined on Linux only"):
        opened(f"programs:{tmp_path}")
