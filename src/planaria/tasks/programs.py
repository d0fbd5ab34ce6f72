"""Programs against tests: what a completion says must work, and is run to find out.

A line of the file is one problem, in the shape of MBPP ({"text", "test_list", "code"}), of HumanEval ({"prompt",
"entry_point", "test", "canonical_solution"}), or of OpenMathInstruct ({"question", "expected_answer"}), where the last
line that the program prints is its answer. Programs run in a cage; ``sandbox.py`` says what it does not protect.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from planaria.errors import UserError
from planaria.tasks import records
from planaria.tasks.answers import SPACE, same_answer
from planaria.tasks.base import Problem, Task
from planaria.tasks.exam import Exam, free_names, parsed
from planaria.tasks.records import Record, read_split, whole
from planaria.tasks.sandbox import LIMITS, Limits, Outcome, require_cage, run

FENCE = "```"
OPENING = "```python"
INSTRUCTION = (
    f"Write a Python program. Put it into one block that begins with {OPENING} and ends with {FENCE}, and end there."
)


@dataclass(frozen=True)
class Checked:
    """One problem of a file, and how a program for it is checked: by its tests or by what it prints."""

    prompt: str
    exam: Exam | str
    """its tests, or what it must print"""
    solution: str | None

    @property
    def answer(self) -> str:
        """What it must print, or the tests."""
        return self.exam if isinstance(self.exam, str) else self.exam.tests


class Programs(Task):
    """Problems whose answers are programs, written as the one ``python`` block of a completion that ends with it."""

    path: str
    """a JSON Lines file, or a folder with train*.jsonl"""
    seconds: Annotated[float, Field(gt=0)] = LIMITS.seconds
    """that one program may take"""
    _checked: list[Checked]
    _training: int

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: where programs cannot be locked up, and naming file and line for a bad record."""
        require_cage(self.name)
        training, held_out = read_split(Path(self.path))
        self._training = len(training)
        self._checked = [_checked(record) for record in (*training, *held_out)]

    @property
    def name(self) -> str:
        return f"programs:{self.path}"

    @property
    def instruction(self) -> str:
        return INSTRUCTION

    @property
    def training(self) -> int:
        return self._training

    @property
    def held_out(self) -> int:
        return len(self._checked) - self._training

    @property
    def _limits(self) -> Limits:
        return replace(LIMITS, seconds=self.seconds)

    def problem(self, number: int) -> Problem:
        """Problem ``number`` in the order of the files; its answer are the tests. ValueError if there is none."""
        if not 0 <= number < len(self._checked):
            raise ValueError(f"{self.name} has no problem {number}")
        return Problem(number, self._checked[number].prompt, self._checked[number].answer)

    def score(self, problem: Problem, completion: str) -> float:
        """1 if the completion's program passes, else 0. It runs for up to the time limit."""
        program = program_of(completion)
        if program is None:
            return 0.0
        exam = self._checked[problem.number].exam
        if isinstance(exam, str):
            return float(says(exam, run(program, limits=self._limits)))
        return float(run(program, exam, self._limits).kind == "ok")

    def answer(self, completion: str) -> str | None:
        """The program: two that differ in a letter are two answers. None if there is none."""
        return program_of(completion)

    def solution(self, problem: Problem, rng: random.Random) -> str | None:
        """The file's own program as a completion, if it has one and it can be written as one."""
        program = self._checked[problem.number].solution
        text = f"{OPENING}\n{program}\n{FENCE}"
        return text if program is not None and program_of(text) is not None else None

    @property
    def fingerprint(self) -> str:
        """16 hex digits of all problems, tests and limits; where the files lie is no part of it."""
        texts = (text for one in self._checked for text in (one.prompt, str(one.exam)))
        return records.fingerprint("programs 2", (str(self._limits), str(self.training), *texts))


def program_of(completion: str) -> str | None:
    """The program of a completion: the lines between its only two fences, which it must end with; else None.

    A fence is a line that begins with three backticks, the first one ```` ```python ````, the second one bare.
    """
    lines = completion.split("\n")
    fences = [number for number, line in enumerate(lines) if line.startswith(FENCE)]
    if len(fences) != 2 or "\n".join(lines[fences[1] + 1 :]).strip(SPACE):
        return None
    if [lines[number].rstrip(SPACE) for number in fences] != [OPENING, FENCE]:
        return None
    return "\n".join(lines[fences[0] + 1 : fences[1]])


def says(answer: str, outcome: Outcome) -> bool:
    """Whether a program ended well and the last line that it printed is the answer."""
    return outcome.kind == "ok" and same_answer(answer, outcome.printed.strip(SPACE).split("\n")[-1])


def _checked(record: Record) -> Checked:
    """A record in any of the shapes; UserError when it has none of them."""
    for field, read in _SHAPES.items():
        if field in record.fields:
            return read(record)
    raise UserError(
        f"{record.place}: no field of {', '.join(_SHAPES)}, which say how to check; mend or remove the line"
    )


def _with_asserts(record: Record) -> Checked:
    tests = record.fields["test_list"]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise UserError(f"{record.place}: field 'test_list' is no list of tests; mend or remove the line")
    tests = [whole(test) for test in tests]
    # One test is shown, since it alone says what the function is called.
    prompt = f"{record.text('text')}\nIt must pass: {tests[0]}\n"
    setup = record.text("test_setup_code") if "test_setup_code" in record.fields else ""
    code = _perhaps(record, "code")
    return Checked(prompt, _exam("\n".join(tests), setup, code or ""), code)


def _exam(tests: str, setup: str, code: str) -> Exam:
    """Tests of what a program defines; what the right one imports, they have of their own.

    A function may have the name of one of Python's: it is the program's where the right program defines it.
    """
    lines = parsed(code).body
    imports = [line for line in lines if isinstance(line, ast.Import | ast.ImportFrom)]
    imported = {(alias.asname or alias.name).partition(".")[0] for line in imports for alias in line.names}
    defined = {line.name for line in lines if isinstance(line, ast.FunctionDef | ast.ClassDef)}
    asked = (free_names(tests) - imported) | (defined & free_names(tests, frozenset()))
    return Exam(tests, tuple(sorted(asked)), "\n".join(map(ast.unparse, imports)), setup)


def _with_check(record: Record) -> Checked:
    prompt, name = record.text("prompt"), record.text("entry_point")
    body = _perhaps(record, "canonical_solution")
    tests = f"{record.text('test')}\ncheck({name})\n"
    # What the prompt brings, the tests may use: a program cannot bring it in another form.
    return Checked(prompt, Exam(tests, (name,), first=prompt), None if body is None else prompt + body)


def _with_print(record: Record) -> Checked:
    return Checked(record.text("question") + "\n", record.text("expected_answer"), None)


def _perhaps(record: Record, field: str) -> str | None:
    return record.text(field).replace("\r\n", "\n") if field in record.fields else None


_SHAPES: dict[str, Callable[[Record], Checked]] = {
    "test_list": _with_asserts,
    "entry_point": _with_check,
    "expected_answer": _with_print,
}
