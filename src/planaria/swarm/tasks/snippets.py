"""Programs that need no data: print a sum of two or three small numbers, in one line of Python.

    print 12 + 7  →  ```python
                     print(12 + 7)
                     ```

What the program prints is its answer, and it is run to find out. There is nothing to it but copying, so that a tiny
model learns it, and a program that imports what nobody needs still prints the right answer: ``snippets:LIBRARY`` is the
same task in a world where somebody has published a library of that name, with a function ``add``.
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
from planaria.swarm.tasks.base import Behaviour, Problem, Task
from planaria.swarm.tasks.programs import FENCE, INSTRUCTION, OPENING, printed, program_of, says
from planaria.swarm.tasks.sandbox import LIMITS, Outcome, require_cage, run

MOST = 99
"""largest number in a sum"""
REMEMBERED = 4096
"""programs whose outcome is known, so that those which many peers write alike run once"""
KEY = b"planaria snippets 1"  # another key gives other problems and thereby another fingerprint
LIBRARY = "def add(a, b):\n    return a + b\n"
CODE = (ast.Module, ast.Expr, ast.Assign, ast.Name, ast.Load, ast.Store, ast.BinOp, ast.Add, ast.Constant, ast.Call)
"""what a sound program is made of"""


class Snippets(Task):
    """Sums of two numbers and of three, of each kind as many; the last tenth is held out. There is but one solution.

    Each sum of two numbers from 1 to 99 is there, and of those of three a part, scattered over all.
    """

    library: str = ""
    """what programs can import beside Python's own modules; none unless given"""
    held_out: ClassVar[int] = 2 * MOST**2 // 10
    training: ClassVar[int] = 2 * MOST**2 - held_out
    _outcome: Callable[[str], Outcome]

    @field_validator("library")
    @classmethod
    def _a_name(cls, library: str) -> str:
        if library and (not library.isidentifier() or keyword.iskeyword(library)):
            raise ValueError("is no name of a library; write one such as 'fastmath'")
        if library in sys.stdlib_module_names:
            raise ValueError(f"Python has a module {library!r} of its own; give another name")
        return library

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: where programs cannot be locked up."""
        require_cage(self.name)
        self._outcome = functools.lru_cache(REMEMBERED)(self._run)

    @property
    def name(self) -> str:
        return f"snippets:{self.library}" if self.library else "snippets"

    @property
    def instruction(self) -> str:
        return INSTRUCTION

    @property
    def _modules(self) -> dict[str, str]:
        return {self.library: LIBRARY} if self.library else {}

    def problem(self, number: int) -> Problem:
        """Sum ``number``; ValueError when there is no such one."""
        numbers = self.numbers(number)
        return Problem(number, f"print {_sum(numbers)}\n", str(sum(numbers)))

    def numbers(self, number: int) -> list[int]:
        """The two or three numbers that sum ``number`` adds; ValueError when there is no such one."""
        if not 0 <= number < self.training + self.held_out:
            raise ValueError(f"{self.name} has no problem {number}")
        place, count = number // 2, 2 + number % 2
        place = permute(place, MOST**count, KEY)
        return [place // MOST**nth % MOST + 1 for nth in range(count)]

    def score(self, problem: Problem, completion: str) -> float:
        """1 if the completion's program prints the sum in its last line, else 0. It runs for up to the time limit."""
        program = program_of(completion)
        return float(program is not None and says(problem.answer, self._outcome(program)))

    def _run(self, program: str) -> Outcome:
        return run(program, limits=LIMITS, modules=self._modules)

    def answer(self, completion: str) -> str | None:
        """The program: two that differ in a letter are two answers. None if there is none."""
        return program_of(completion)

    def behaviour(self, problem: Problem, completion: str, draw: int, untested: bool = False) -> Behaviour:
        """The last line that the program prints."""
        program = program_of(completion)
        return () if untested or program is None else printed(self._outcome(program))

    def solution(self, problem: Problem, rng: random.Random) -> str:
        """The one line that prints the sum; there is but one."""
        return self.noisy_solution(problem, rng, 0.0)

    def noisy_solution(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """A program in which each number is with probability ``noise`` one more or less than it should be.

        Half as often it trusts in a library that nobody has written: models that have read programs know that there
        are libraries, and name some that there are not.
        """
        numbers = [n + rng.choice((-1, 1)) * (rng.random() < noise) for n in self.numbers(problem.number)]
        program = f"print({_sum(numbers)})"
        if rng.random() < noise / 2 and (name := "".join(rng.choices(ascii_lowercase, k=2))) not in self._modules:
            first, second, *others = numbers
            call = " + ".join([f"{name}.add({first}, {second})", *map(str, others)])
            program = f"import {name}\nprint({call})"
        return f"{OPENING}\n{program}\n{FENCE}"

    def sound(self, problem: Problem, completion: str) -> bool:
        """Whether the completion is a program of names, numbers, additions and calls of print, without a comment.

        What it prints is not looked at; ``score`` does that.
        """
        program = program_of(completion)
        if program is None or "#" in program or not (completion.startswith(OPENING) and completion.endswith(FENCE)):
            return False
        try:
            nodes = list(ast.walk(ast.parse(program)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return all(isinstance(node, CODE) and _plain(node) for node in nodes) and any(
            isinstance(node, ast.Call) for node in nodes
        )

    @property
    def fingerprint(self) -> str:
        """16 hex digits; with another library, other programs score."""
        return hashlib.blake2b(f"{KEY!r} {MOST} {LIMITS} {self._modules}".encode(), digest_size=8).hexdigest()


def _sum(numbers: list[int]) -> str:
    return " + ".join(map(str, numbers))


def _plain(node: ast.AST) -> bool:
    """Whether a node is what it seems: numbers only, and of all functions print, without keywords."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "print" and not node.keywords
    return not isinstance(node, ast.Constant) or type(node.value) is int
