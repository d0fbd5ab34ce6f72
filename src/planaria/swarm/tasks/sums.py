"""A task that needs no data: column addition of two numbers with every step written down.

    47+85=  →  7+5=12,4+8+1=13;[132]

Columns run from the right; the carry is added last. A tiny model learns the task in a minute. Every equation can be
checked, which reveals false reasoning behind a right answer.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from planaria.data.permutation import permute
from planaria.swarm.tasks.answers import BRACKETS, parse
from planaria.swarm.tasks.base import ErringTask, TaskProblem

MAX_DIGITS = 18
MAX_PROBLEMS = 1_000_000
KEY = b"planaria sums 1"  # determines the problems and the fingerprint
SLIPS = (-2, -1, 1, 2)

Column = tuple[int, int, int, int]
"""two digits, the carry in, and the written result"""

Writer = Callable[[Column, bool], str]
"""writes a column and its separator; the flag marks the last column"""


class Sums(ErringTask):
    """Sums of two numbers of ``digits`` digits each, worked out in one of two styles.

    Every pair of operands is one problem, up to a million pairs sampled from all; the last tenth is held out. Problems,
    scores and soundness do not depend on ``style`` and ``carries``, so peers may differ in them.
    """

    digits: Annotated[int, Field(ge=2, le=MAX_DIGITS)] = 2
    style: Literal["columns", "words"] = "columns"
    carries: Annotated[str, Field(pattern="^[01]*$")] = ""
    """vertical rounds: the sums that this peer chooses, by column from the right: 1 with a carry, 0 without; "10": only
    the first column carries; empty: any sum"""

    @property
    def name(self) -> str:
        return "sums" if self.digits == 2 else f"sums:{self.digits}"

    @property
    def instruction(self) -> str:
        return BRACKETS.instruction

    @property
    def training(self) -> int:
        return min(self._span**2, MAX_PROBLEMS) - self.held_out

    @property
    def held_out(self) -> int:
        return min(self._span**2, MAX_PROBLEMS) // 10

    @property
    def _span(self) -> int:
        return 9 * int(10 ** (self.digits - 1))

    def problem(self, number: int) -> TaskProblem:
        a, b = self.operands(number)
        return TaskProblem(number, f"{a}+{b}=", str(a + b))

    def operands(self, number: int) -> tuple[int, int]:
        """Return the operands of sum ``number``; ValueError if there is none."""
        self.check_number(number)
        row, column = divmod(permute(number, self._span**2, KEY), self._span)
        return row + self._span // 9, column + self._span // 9

    def chooses(self, number: int) -> bool:
        a, b = self.operands(number)
        carried = [a % 10**n + b % 10**n >= 10**n for n in range(1, len(self.carries) + 1)]
        return carried == [mark == "1" for mark in self.carries]

    def score(self, problem: TaskProblem, completion: str) -> float:
        """Return 1 if the bracketed answer is exactly the sum ("0132" and "+132" are not), else 0."""
        parsed = parse(BRACKETS, completion)
        return float(parsed is not None and parsed.answer == problem.answer)

    def answer(self, completion: str) -> str | None:
        """Return the text in the brackets, or None if there are none."""
        parsed = parse(BRACKETS, completion)
        return None if parsed is None else parsed.answer

    def noisy_solution(self, problem: TaskProblem, rng: random.Random, noise: float) -> str:
        """Return a solution in which each column is off by one or two with probability ``noise``.

        Later columns and the answer follow from the error. Errors are too small to cancel, so the answer is right only
        if no column is wrong.
        """
        columns = self._columns(problem, lambda result: _slip(result, rng) if rng.random() < noise else result)
        value = sum(result % 10 * 10**index for index, (_, _, _, result) in enumerate(columns))
        value += columns[-1][3] // 10 * 10 ** len(columns)
        written = [_WRITERS[self.style](column, index == self.digits) for index, column in enumerate(columns, start=1)]
        return BRACKETS.write("".join(written), str(value))

    def sound(self, problem: TaskProblem, completion: str) -> bool:
        """Return whether the completion is a scratch of the true columns and the right answer, in either style.

        No other text is allowed, nor swapped digits of a column: their order could carry a message.
        """
        parsed = parse(BRACKETS, completion)
        if parsed is None or parsed.answer != problem.answer or completion[-1] != BRACKETS.answer_close:
            return False
        columns = [*enumerate(self._columns(problem), start=1)]
        return parsed.reasoning in {
            "".join(write(column, index == self.digits) for index, column in columns) for write in _WRITERS.values()
        }

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits, equal for all styles and choices of problems."""
        return hashlib.blake2b(f"{KEY!r} {self.digits}".encode(), digest_size=8).hexdigest()

    def _columns(self, problem: TaskProblem, result: Callable[[int], int] = lambda result: result) -> list[Column]:
        """Return the columns from the right, with ``result`` applied to each true result."""
        a, b = self.operands(problem.number)
        columns: list[Column] = []
        for index in range(self.digits):
            one, other = a // 10**index % 10, b // 10**index % 10
            carry = columns[-1][3] // 10 if columns else 0
            columns.append((one, other, carry, result(one + other + carry)))
        return columns


def _slip(result: int, rng: random.Random) -> int:
    return result + rng.choice([slip for slip in SLIPS if result + slip >= 0])


def _equation(one: int, other: int, carry: int, result: int) -> str:
    return f"{one}+{other}={result}" if not carry else f"{one}+{other}+{carry}={result}"


def _in_columns(column: Column, last: bool) -> str:
    return _equation(*column) + (";" if last else ",")


def _in_words(column: Column, last: bool) -> str:
    one, other, carry, result = column
    equation = _equation(other, one, carry, result)
    return f"{equation};" if last else f"{equation} keep {result % 10} carry {result // 10};"


_WRITERS: dict[str, Writer] = {"columns": _in_columns, "words": _in_words}
