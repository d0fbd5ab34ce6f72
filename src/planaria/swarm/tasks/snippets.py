"""Programs that need no data: print a sum of two or three small numbers, in one line of Python.

    print 12 + 7  →  ```python
                     print(12 + 7)
                     ```

A program's output is its answer. The task is simple enough for a tiny model. A program with a needless import still
prints the right answer: with the option ``library``, programs can import a library of that name with a function
``add``.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import keyword
import random
import sys
from collections.abc import Callable
from string import ascii_lowercase
from typing import Any, ClassVar

from pydantic import field_validator

from planaria.data.permutation import permute
from planaria.swarm.sandbox.sandbox import LIMITS, ProgramResult, require_sandbox, run
from planaria.swarm.tasks.base import Behaviour, ErringTask, TaskProblem
from planaria.swarm.tasks.programs import FENCE, INSTRUCTION, OPENING, printed_behaviour, prints_answer, program_of

MAX_SUMMAND = 99
"""largest number in a sum"""
CACHED = 4096
"""cached outcomes, so that a program that many peers write runs once"""
KEY = b"planaria snippets 1"  # determines the problems and the fingerprint
LIBRARY = "def add(a, b):\n    return a + b\n"
CODE = (ast.Module, ast.Expr, ast.Assign, ast.Name, ast.Load, ast.Store, ast.BinOp, ast.Add, ast.Constant, ast.Call)
"""node types of a sound program"""


class Snippets(ErringTask):
    """Sums of two numbers and of three, in equal parts; the last tenth is held out. Each has one solution.

    All sums of two numbers from 1 to 99 occur, and a sample of those of three.
    """

    library: str = ""
    """importable library in addition to the standard library; none if empty"""
    held_out: ClassVar[int] = 2 * MAX_SUMMAND**2 // 10
    training: ClassVar[int] = 2 * MAX_SUMMAND**2 - held_out
    _outcome: Callable[[str], ProgramResult]

    @field_validator("library")
    @classmethod
    def _check_library(cls, library: str) -> str:
        if library and (not library.isidentifier() or keyword.iskeyword(library)):
            raise ValueError("is not a library name; use one such as 'fastmath'")
        if library in sys.stdlib_module_names:
            raise ValueError(f"{library!r} is a module of the standard library; use another name")
        return library

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: if programs cannot be confined."""
        require_sandbox(self.name)
        self._outcome = functools.lru_cache(CACHED)(functools.partial(run, modules=self._modules))

    @property
    def name(self) -> str:
        return f"snippets:{self.library}" if self.library else "snippets"

    @property
    def instruction(self) -> str:
        return INSTRUCTION

    @property
    def _modules(self) -> dict[str, str]:
        return {self.library: LIBRARY} if self.library else {}

    def problem(self, number: int) -> TaskProblem:
        numbers = self.numbers(number)
        return TaskProblem(number, f"print {_sum(numbers)}\n", str(sum(numbers)))

    def numbers(self, number: int) -> list[int]:
        """Return the two or three numbers of sum ``number``; ValueError if there is none."""
        self.check_number(number)
        index, count = number // 2, 2 + number % 2
        index = permute(index, MAX_SUMMAND**count, KEY)
        return [index // MAX_SUMMAND**nth % MAX_SUMMAND + 1 for nth in range(count)]

    def score(self, problem: TaskProblem, completion: str) -> float:
        """Return 1 if the last line the completion's program prints is the sum, else 0."""
        program = program_of(completion)
        return float(program is not None and prints_answer(problem.answer, self._outcome(program)))

    def answer(self, completion: str) -> str | None:
        return program_of(completion)

    def behaviour(self, problem: TaskProblem, completion: str, draw: int, untested: bool = False) -> Behaviour:
        program = program_of(completion)
        return () if untested or program is None else printed_behaviour(self._outcome(program))

    def noisy_solution(self, problem: TaskProblem, rng: random.Random, noise: float) -> str:
        """Return a program in which each number is off by one with probability ``noise``.

        With probability ``noise`` / 2 it uses a library that does not exist, as models trained on code do.
        """
        numbers = [n + rng.choice((-1, 1)) * (rng.random() < noise) for n in self.numbers(problem.number)]
        program = f"print({_sum(numbers)})"
        if rng.random() < noise / 2 and (name := "".join(rng.choices(ascii_lowercase, k=2))) not in self._modules:
            first, second, *others = numbers
            call = " + ".join([f"{name}.add({first}, {second})", *map(str, others)])
            program = f"import {name}\nprint({call})"
        return f"{OPENING}\n{program}\n{FENCE}"

    def sound(self, problem: TaskProblem, completion: str) -> bool:
        """Return whether the program has only names, numbers, additions and calls of print, whatever its output."""
        program = program_of(completion)
        if program is None or "#" in program or not (completion.startswith(OPENING) and completion.endswith(FENCE)):
            return False
        try:
            nodes = list(ast.walk(ast.parse(program)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return all(isinstance(node, CODE) and _is_plain(node) for node in nodes) and any(
            isinstance(node, ast.Call) for node in nodes
        )

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(f"{KEY!r} {MAX_SUMMAND} {LIMITS} {self._modules}".encode(), digest_size=8).hexdigest()


def _sum(numbers: list[int]) -> str:
    return " + ".join(map(str, numbers))


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "print" and not node.keywords
    return not isinstance(node, ast.Constant) or type(node.value) is int
