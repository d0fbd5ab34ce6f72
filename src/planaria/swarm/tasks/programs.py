"""Programs scored by tests or by their output.

Each line of the file is one problem, in one of four shapes:

- MBPP: {"text", "test_list", "code"};
- HumanEval: {"prompt", "entry_point", "test", "canonical_solution"};
- OpenMathInstruct: {"question", "expected_answer"}; the last printed line is the answer;
- calls of the requested function: {"prompt", "entry_point", "calls"}; programs are compared but not scored.

Programs run in a sandbox; ``sandbox.py`` lists its limits.
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
from planaria.data.records import without_surrogates
from planaria.swarm.sandbox.sandbox import (
    LIMITS,
    Limits,
    ProgramResult,
    ProgramTests,
    free_names,
    parse_python,
    require_sandbox,
    run,
)
from planaria.swarm.tasks import calls as calling
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import SPACE, canonical, same_answer
from planaria.swarm.tasks.base import Behaviour, Task, TaskProblem
from planaria.swarm.tasks.calls import Call
from planaria.swarm.tasks.records import TaskRecord, read_split

VARIANTS = 12
"""random calls of one problem in one round"""
FENCE = "```"
OPENING = "```python"
INSTRUCTION = (
    f"Write a Python program. Put it into one block that begins with {OPENING} and ends with {FENCE}, and end there."
)


@dataclass(frozen=True)
class ProgramProblem:
    """One problem of a file and how its programs are scored: by tests, by output, or not at all."""

    prompt: str
    exam: ProgramTests | str | None
    """tests, expected output, or None if nothing scores"""
    solution: str | None
    calls: tuple[Call, ...] = ()
    """calls with literal arguments, from the tests or the record"""

    @property
    def answer(self) -> str:
        """Return the tests or the expected output, or an empty string if there is neither."""
        return self.exam.tests if isinstance(self.exam, ProgramTests) else self.exam or ""

    def calls_to_compare(self, draw: int, number: int, untested: bool) -> list[Call]:
        """Return the calls on which programs are compared, random variants last; only these if ``untested``.

        Of a problem's tests only every other call is used; the others show afterwards which programs were right.
        """
        own = self.calls if self.exam is None else self.calls[::2]
        drawn = calling.variants(self.calls, f"{draw} {number}", VARIANTS)
        return drawn if untested else [*own, *drawn][: calling.MAX_CALLS]


class Programs(Task):
    """Problems whose answers are programs: the one ``python`` block that ends a completion."""

    path: str
    """a JSON Lines file, or a folder with train*.jsonl"""
    seconds: Annotated[float, Field(gt=0)] = LIMITS.seconds
    """maximum run time of one program"""
    _problems: list[ProgramProblem] = PrivateAttr()
    _training: int = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: if programs cannot be confined, or with file and line for an invalid record."""
        require_sandbox(self.name)
        training, held_out = read_split(Path(self.path))
        self._training = len(training)
        self._problems = [_read_problem(record) for record in (*training, *held_out)]

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
        return len(self._problems) - self._training

    @functools.cached_property
    def unlabelled(self) -> frozenset[int]:
        return frozenset(number for number, problem in enumerate(self._problems) if problem.exam is None)

    @property
    def probing(self) -> bool:
        return any(problem.calls for problem in self._problems[: self._training])

    @property
    def _limits(self) -> Limits:
        return replace(LIMITS, seconds=self.seconds)

    def problem(self, number: int) -> TaskProblem:
        self.check_number(number)
        return TaskProblem(number, self._problems[number].prompt, self._problems[number].answer)

    def score(self, problem: TaskProblem, completion: str) -> float:
        """Return 1 if the completion's program passes, else 0. Takes up to ``seconds``."""
        program, exam = program_of(completion), self._problems[problem.number].exam
        if program is None or exam is None:
            return 0.0
        if isinstance(exam, str):
            return float(prints_answer(exam, run(program, limits=self._limits)))
        return float(run(program, exam, self._limits).kind == "ok")

    def answer(self, completion: str) -> str | None:
        return program_of(completion)

    def behaviour(self, problem: TaskProblem, completion: str, draw: int, untested: bool = False) -> Behaviour:
        """Return the program's results on the problem's calls and on variants, or the last line it prints."""
        program, checked = program_of(completion), self._problems[problem.number]
        if isinstance(checked.exam, str):
            return () if untested or program is None else printed_behaviour(run(program, limits=self._limits))
        calls = checked.calls_to_compare(draw, problem.number, untested)
        if program is None or not calls:
            return ()
        return calling.run_calls(program, calls, self._limits, "" if checked.exam is None else checked.exam.setup)

    def calls(self, number: int, draw: int) -> list[Call]:
        return self._problems[number].calls_to_compare(draw, number, untested=False)

    def solution(self, problem: TaskProblem, rng: random.Random) -> str | None:
        """Return the file's program as a completion, or None if it has none or the form cannot hold it."""
        program = self._problems[problem.number].solution
        text = f"{OPENING}\n{program}\n{FENCE}"
        return text if program is not None and program_of(text) is not None else None

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits of all problems, tests and limits, independent of file paths."""
        texts = (text for problem in self._problems for text in (problem.prompt, str(problem.exam or problem.calls)))
        return records.fingerprint("programs 2", (str(self._limits), str(self.training), *texts))


def program_of(completion: str) -> str | None:
    """Return the lines between a completion's only two fences, or None unless it ends with the second.

    A fence is a line that begins with three backticks. The first must be ```` ```python ````, the second bare.
    """
    lines = completion.split("\n")
    fences = [number for number, line in enumerate(lines) if line.startswith(FENCE)]
    if len(fences) != 2 or "\n".join(lines[fences[1] + 1 :]).strip(SPACE):
        return None
    if [lines[number].rstrip(SPACE) for number in fences] != [OPENING, FENCE]:
        return None
    return "\n".join(lines[fences[0] + 1 : fences[1]])


def _last_line(outcome: ProgramResult) -> str:
    return outcome.printed.strip(SPACE).split("\n")[-1]


def prints_answer(answer: str, outcome: ProgramResult) -> bool:
    """Return whether a program succeeded and the last line it printed is the answer."""
    return outcome.kind == "ok" and same_answer(answer, _last_line(outcome))


def printed_behaviour(outcome: ProgramResult) -> Behaviour:
    """Return the last line a program printed as its behaviour; the entry is None if it printed none or failed."""
    return (canonical(_last_line(outcome)) or None,) if outcome.kind == "ok" else (None,)


def _read_problem(record: TaskRecord) -> ProgramProblem:
    """Read a record of any shape; UserError if it has none of the known fields."""
    for field, read in _SHAPES.items():
        if field in record.fields:
            return read(record)
    raise UserError(
        f"{record.location}: no field of {', '.join(_SHAPES)}, which define scoring; fix or remove the line"
    )


def _read_mbpp(record: TaskRecord) -> ProgramProblem:
    tests = record.fields["test_list"]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise UserError(f"{record.location}: field 'test_list' is not a list of tests; fix or remove the line")
    tests = [without_surrogates(test) for test in tests]
    # The first test is shown: it defines the function's name.
    prompt = f"{record.text('text')}\nIt must pass: {tests[0]}\n"
    setup = record.text("test_setup_code") if "test_setup_code" in record.fields else ""
    code = _optional_text(record, "code")
    exam = _make_tests("\n".join(tests), setup, code or "")
    return ProgramProblem(
        prompt, exam, code, tuple(calling.calls_in_tests(exam.tests, {name: name for name in exam.names}))
    )


def _make_tests(tests: str, setup: str, code: str) -> ProgramTests:
    """Return an exam of the names that the program must define; it has its own imports, taken from ``code``.

    A built-in name counts as the program's if ``code`` defines it.
    """
    lines = parse_python(code).body
    imports = [line for line in lines if isinstance(line, ast.Import | ast.ImportFrom)]
    imported = {(alias.asname or alias.name).partition(".")[0] for line in imports for alias in line.names}
    defined = {line.name for line in lines if isinstance(line, ast.FunctionDef | ast.ClassDef)}
    requested = (free_names(tests) - imported) | (defined & free_names(tests, frozenset()))
    return ProgramTests(tests, tuple(sorted(requested)), "\n".join(map(ast.unparse, imports)), setup)


def _read_humaneval(record: TaskRecord) -> ProgramProblem:
    prompt, name = record.text("prompt"), record.text("entry_point")
    tests = f"{record.text('test')}\ncheck({name})\n"
    calls = calling.calls_in_tests(tests, dict.fromkeys([name, *_first_arguments(tests, "check")], name))
    # Tests may use helpers of the prompt; a program cannot replace them.
    return ProgramProblem(prompt, ProgramTests(tests, (name,), first=prompt), _solution(record, prompt), tuple(calls))


def _read_calls(record: TaskRecord) -> ProgramProblem:
    prompt = record.text("prompt")
    name = record.text("entry_point")
    texts = record.fields["calls"]
    if (
        not isinstance(texts, list)
        or not 0 < len(texts) <= calling.MAX_CALLS
        or not all(isinstance(c, str) for c in texts)
    ):
        raise UserError(
            f"{record.location}: field 'calls' is not a list of 1 to {calling.MAX_CALLS} calls; fix or remove the line"
        )
    try:
        calls = {call.source: call for call in (calling.parse_call(text, name) for text in texts)}
    except ValueError as error:
        raise UserError(f"{record.location}: field 'calls': {error}; fix or remove the line") from None
    return ProgramProblem(prompt, None, _solution(record, prompt), tuple(calls.values()))


def _solution(record: TaskRecord, prompt: str) -> str | None:
    body = _optional_text(record, "canonical_solution")
    return None if body is None else prompt + body


def _first_arguments(source: str, name: str) -> list[str]:
    functions = [node for node in parse_python(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [node.args.args[0].arg for node in functions if node.args.args]


def _read_question(record: TaskRecord) -> ProgramProblem:
    return ProgramProblem(record.text("question") + "\n", record.text("expected_answer"), None)


def _optional_text(record: TaskRecord, field: str) -> str | None:
    return record.text(field).replace("\r\n", "\n") if field in record.fields else None


_SHAPES: dict[str, Callable[[TaskRecord], ProgramProblem]] = {
    "test_list": _read_mbpp,
    "calls": _read_calls,
    "entry_point": _read_humaneval,
    "expected_answer": _read_question,
}
