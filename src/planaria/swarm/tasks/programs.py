"""Programs against tests: what a completion says must work, and is run to find out.

A line of the file is one problem, in the shape of MBPP ({"text", "test_list", "code"}), of HumanEval ({"prompt",
"entry_point", "test", "canonical_solution"}), or of OpenMathInstruct ({"question", "expected_answer"}), where the last
line that the program prints is its answer. A fourth shape has no answers, only calls of the function that is asked for
({"prompt", "entry_point", "calls"}): what programs do there can be compared, and nothing scores.

Programs run in a cage; ``sandbox.py`` says what it does not protect.
"""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from planaria.common.errors import UserError
from planaria.swarm.tasks import calls as calling
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import SPACE, canonical, same_answer
from planaria.swarm.tasks.base import Behaviour, Problem, Task
from planaria.swarm.tasks.calls import Call
from planaria.swarm.tasks.records import Record, read_split, whole
from planaria.swarm.tasks.sandbox import LIMITS, Exam, Limits, Outcome, free_names, parsed, require_cage, run

VARIANTS = 12
"""calls that are drawn for one problem in one round"""
FENCE = "```"
OPENING = "```python"
INSTRUCTION = (
    f"Write a Python program. Put it into one block that begins with {OPENING} and ends with {FENCE}, and end there."
)


@dataclass(frozen=True)
class Checked:
    """One problem of a file, and how a program for it is checked: by its tests, by what it prints, or not at all."""

    prompt: str
    exam: Exam | str | None
    """its tests, what it must print, or nothing"""
    solution: str | None
    calls: tuple[Call, ...] = ()
    """with literal arguments: those of its tests, or its own"""

    @property
    def answer(self) -> str:
        """What it must print, or the tests; empty if there is neither."""
        return self.exam.tests if isinstance(self.exam, Exam) else self.exam or ""

    def asked(self, draw: int, number: int, untested: bool) -> list[Call]:
        """The calls on which programs are compared, those that are drawn last. ``untested``: none of its tests' own.

        Of a problem with tests only every other call of theirs is used: by the rest it can be told who was right.
        """
        own = self.calls if self.exam is None else self.calls[::2]
        drawn = calling.variants(self.calls, f"{draw} {number}", VARIANTS)
        return drawn if untested else [*own, *drawn][: calling.MOST]


class Programs(Task):
    """Problems whose answers are programs, written as the one ``python`` block of a completion that ends with it."""

    path: str
    """a JSON Lines file, or a folder with train*.jsonl"""
    seconds: Annotated[float, Field(gt=0)] = LIMITS.seconds
    """that one program may take"""
    _checked: list[Checked] = PrivateAttr()
    _training: int = PrivateAttr()

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

    @functools.cached_property
    def unlabelled(self) -> frozenset[int]:
        return frozenset(number for number, one in enumerate(self._checked) if one.exam is None)

    @property
    def probing(self) -> bool:
        return any(one.calls for one in self._checked[: self._training])

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
        program, exam = program_of(completion), self._checked[problem.number].exam
        if program is None or exam is None:
            return 0.0
        if isinstance(exam, str):
            return float(says(exam, run(program, limits=self._limits)))
        return float(run(program, exam, self._limits).kind == "ok")

    def answer(self, completion: str) -> str | None:
        """The program: two that differ in a letter are two answers. None if there is none."""
        return program_of(completion)

    def behaviour(self, problem: Problem, completion: str, draw: int, untested: bool = False) -> Behaviour:
        """What the program gives on calls of the problem's and on variants of them; or the last line that it prints."""
        program, checked = program_of(completion), self._checked[problem.number]
        if isinstance(checked.exam, str):
            return () if untested or program is None else printed(run(program, limits=self._limits))
        asked = checked.asked(draw, problem.number, untested)
        if program is None or not asked:
            return ()
        exam = calling.exam(asked, "" if checked.exam is None else checked.exam.setup)
        told = run(program, exam, self._limits).told
        return tuple(line or None for line in told) + (None,) * (len(asked) - len(told))

    def calls(self, number: int, draw: int) -> list[Call]:
        """The calls on which programs for problem ``number`` are compared; none if it has none."""
        return self._checked[number].asked(draw, number, untested=False)

    def solution(self, problem: Problem, rng: random.Random) -> str | None:
        """The file's own program as a completion, if it has one and it can be written as one."""
        program = self._checked[problem.number].solution
        text = f"{OPENING}\n{program}\n{FENCE}"
        return text if program is not None and program_of(text) is not None else None

    @property
    def fingerprint(self) -> str:
        """16 hex digits of all problems, tests and limits; where the files lie is no part of it."""
        texts = (text for one in self._checked for text in (one.prompt, str(one.exam or one.calls)))
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


def printed(outcome: Outcome) -> Behaviour:
    """The last line that a program printed, if it ended well, as what it does."""
    last = canonical(outcome.printed.strip(SPACE).split("\n")[-1])
    return (last or None,) if outcome.kind == "ok" else (None,)


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
    exam = _exam("\n".join(tests), setup, code or "")
    return Checked(prompt, exam, code, tuple(calling.in_tests(exam.tests, {name: name for name in exam.names})))


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
    tests = f"{record.text('test')}\ncheck({name})\n"
    calls = calling.in_tests(tests, dict.fromkeys([name, *_first_words(tests, "check")], name))
    # What the prompt brings, the tests may use: a program cannot bring it in another form.
    return Checked(prompt, Exam(tests, (name,), first=prompt), _whole(record, prompt), tuple(calls))


def _with_calls(record: Record) -> Checked:
    prompt, name, said = record.text("prompt"), record.text("entry_point"), record.fields["calls"]
    if not isinstance(said, list) or not 0 < len(said) <= calling.MOST or not all(isinstance(c, str) for c in said):
        raise UserError(
            f"{record.place}: field 'calls' is no list of 1 to {calling.MOST} calls; mend or remove the line"
        )
    try:
        calls = {call.source: call for call in (calling.read(text, name) for text in said)}
    except ValueError as error:
        raise UserError(f"{record.place}: field 'calls': {error}; mend or remove the line") from None
    return Checked(prompt, None, _whole(record, prompt), tuple(calls.values()))


def _whole(record: Record, prompt: str) -> str | None:
    """The right program, of which a record has what follows the prompt."""
    body = _perhaps(record, "canonical_solution")
    return None if body is None else prompt + body


def _first_words(source: str, name: str) -> list[str]:
    """What the function ``name`` calls its first argument, wherever some Python defines it."""
    functions = [node for node in parsed(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [node.args.args[0].arg for node in functions if node.args.args]


def _with_print(record: Record) -> Checked:
    return Checked(record.text("question") + "\n", record.text("expected_answer"), None)


def _perhaps(record: Record, field: str) -> str | None:
    return record.text(field).replace("\r\n", "\n") if field in record.fields else None


_SHAPES: dict[str, Callable[[Record], Checked]] = {
    "test_list": _with_asserts,
    "calls": _with_calls,
    "entry_point": _with_check,
    "expected_answer": _with_print,
}
