"""The task that needs no data: adding two numbers column by column, with every step written down.

    47+85=  →  7+5=12,4+8+1=13;[132]

Columns run from the right; what is carried is added last. A tiny model learns it in a minute, and because every
equation can be checked it shows what the reward alone does not: reasoning that is false while the answer is right.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from planaria.data.permutation import permute
from planaria.swarm.tasks.answers import BRACKETS, parse
from planaria.swarm.tasks.base import Problem, Task

MAX_DIGITS = 18
MAX_PROBLEMS = 1_000_000
KEY = b"planaria sums 1"  # another key gives other problems and thereby another fingerprint
SLIPS = (-2, -1, 1, 2)

Column = tuple[int, int, int, int]
"""two digits, what is carried in, and the result as it is written"""

Writer = Callable[[Column, bool], str]
"""writes a column down, and what stands between it and the next; told whether it is the last one"""


class Sums(Task):
    """Sums of two numbers of ``digits`` digits each; ``style`` is the one of the two scratches that it writes.

    All pairs of operands are there (at most a million of them, scattered over all), each under one number; the last
    tenth is held out. a+b and b+a are two problems. Scores and soundness are the same for both styles.
    """

    digits: Annotated[int, Field(ge=2, le=MAX_DIGITS)] = 2
    style: Literal["columns", "words"] = "columns"

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
        """How many numbers there are of so many digits."""
        return 9 * int(10 ** (self.digits - 1))

    def problem(self, number: int) -> Problem:
        """Sum ``number``; ValueError when there is no such one."""
        a, b = self.operands(number)
        return Problem(number, f"{a}+{b}=", str(a + b))

    def operands(self, number: int) -> tuple[int, int]:
        """The two numbers that sum ``number`` adds; ValueError when there is no such one."""
        if not 0 <= number < self.training + self.held_out:
            raise ValueError(f"{self.name} has no problem {number}")
        row, column = divmod(permute(number, self._span**2, KEY), self._span)
        return row + self._span // 9, column + self._span // 9

    def score(self, problem: Problem, completion: str) -> float:
        """1 if the bracketed answer is the sum to the letter ("0132" and "+132" are not), else 0."""
        parsed = parse(BRACKETS, completion)
        return float(parsed is not None and parsed.answer == problem.answer)

    def answer(self, completion: str) -> str | None:
        """What stands in the brackets; None if there is no such block."""
        parsed = parse(BRACKETS, completion)
        return None if parsed is None else parsed.answer

    def solution(self, problem: Problem, rng: random.Random) -> str:
        """The worked solution in this task's style; there is but one."""
        return self.noisy_solution(problem, rng, 0.0)

    def noisy_solution(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """A solution whose columns are each off by one or two with probability ``noise``, for a teacher who errs.

        A slip is carried on into the later columns and the answer, so the text agrees with itself, and its answer is
        right only where no column slipped: the slips are too small to cancel each other.
        """
        columns = self._columns(problem, lambda result: _slip(result, rng) if rng.random() < noise else result)
        value = sum(result % 10 * 10**place for place, (_, _, _, result) in enumerate(columns))
        value += columns[-1][3] // 10 * 10 ** len(columns)
        written = [_WRITERS[self.style](column, place == self.digits) for place, column in enumerate(columns, start=1)]
        return BRACKETS.write("".join(written), str(value))

    def sound(self, problem: Problem, completion: str) -> bool:
        """Whether the completion is one of the scratches of the sum's true columns and its right answer, to the letter.

        Either style and either order of the two digits will do; anything else, be it one word more, will not.
        """
        parsed = parse(BRACKETS, completion)
        if parsed is None or parsed.answer != problem.answer or completion[-1] != BRACKETS.answer_close:
            return False
        return any(self._follows(parsed.reasoning, problem, write) for write in _WRITERS.values())

    @property
    def fingerprint(self) -> str:
        """16 hex digits; the same for both styles, whose problems and scores are the same."""
        return hashlib.blake2b(f"{KEY!r} {self.digits}".encode(), digest_size=8).hexdigest()

    def _follows(self, reasoning: str, problem: Problem, write: Writer) -> bool:
        """Whether a reasoning is that of the true columns in one style, in either order of the two digits of each."""
        at = 0
        for place, (one, other, carry, result) in enumerate(self._columns(problem), start=1):
            said = [
                write(column, place == self.digits)
                for column in ((one, other, carry, result), (other, one, carry, result))
            ]
            length = next((len(text) for text in said if reasoning.startswith(text, at)), 0)
            if not length:
                return False
            at += length
        return at == len(reasoning)

    def _columns(self, problem: Problem, result: Callable[[int], int] = lambda result: result) -> list[Column]:
        """The columns of a sum from the right, each result as ``result`` makes it of the true one."""
        a, b = self.operands(problem.number)
        columns: list[Column] = []
        for place in range(self.digits):
            one, other = a // 10**place % 10, b // 10**place % 10
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
