"""Codes of light checks: complete a Tanner graph, so that any few losses can be borne and every check stays light.

    a0,b0,c1,d1,a2,c2,b3,d3=  →  [a4,d4,b5,c5,a6,b6,c6,a7,b7,d7]

Letters are checks, numbers are shards; an edge says that a shard is in a check. The problem shows the edges of the
first shards, and the completion names those of the others. There are many right answers, none is looked up, and a text
is paid what the code that it describes is worth, counted by enumeration (``recovery/codes/search.py``).
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from string import ascii_lowercase
from typing import Annotated, Any, ClassVar

from pydantic import Field

from planaria.common.errors import UserError
from planaria.recovery.codes import gf2
from planaria.recovery.codes.search import Target, worth
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import FORMS, Form, Style, parse
from planaria.swarm.tasks.base import Problem, Task

KEY = b"planaria codes 1"  # another key gives other problems and thereby another fingerprint
MAX_CHECKS = 12
"""of a problem: more are no matter for a text, and all sums of few columns are kept at hand"""
TRIES, FIRST = 64, 1000
"""orders of shards that are tried for a problem; for the first one, by which a task is found possible at all"""
FAVOUR = 4
"""how much earlier a shard with one check less comes, in the median: heavy ones are many, and fill the checks"""
KEPT = 4096
"""problems at hand"""


class Codes(Task):
    """Codes of ``shards`` of which ``data`` are data, with ``distance``; checks of at most ``weight`` shards.

    Each problem is a code that was built shard by shard in an order of its own, and shows ``shown`` of them. Problems
    are drawn, so that among few shards a held-out one may happen to be among the training problems too.
    """

    shards: int = 8
    data: int = 4
    distance: Annotated[int, Field(ge=2)] = 3
    weight: int = 4
    degree: Annotated[int, Field(ge=1)] = 3
    """most checks that a shard is in"""
    shown: Annotated[int, Field(ge=1)] = 4
    """shards whose edges the problem shows"""
    style: Style = "brackets"
    training: ClassVar[int] = 9_000
    held_out: ClassVar[int] = 1_000
    _target: Target
    _vectors: tuple[int, ...]
    _edges: dict[str, tuple[int, int]]
    _columns: Callable[[int], tuple[int, ...]]
    _first: tuple[int, ...]

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: for a code that no text can name, bounds forbid, or nothing was found for."""
        self._target = Target(self.shards, self.data, self.distance, self.weight, self.degree)
        checks = self._target.checks
        if checks > MAX_CHECKS:
            raise UserError(f"task {self.name}: {checks} checks, of at most {MAX_CHECKS}; give fewer shards")
        if self.shown >= self.shards:
            raise UserError(f"task {self.name}: shown = {self.shown} of {self.shards} shards leaves none to write")
        self._vectors = tuple(vector for vector in range(1, 1 << checks) if vector.bit_count() <= self.degree)
        self._edges = {_edge(c, s): (c, s) for s in range(self.shown, self.shards) for c in range(checks)}
        found = next(filter(None, (self._tried(0, attempt) for attempt in range(FIRST))), None)
        if found is None:
            raise UserError(
                f"task {self.name}: no code was found in {FIRST} tries; give larger weight or degree, or less distance"
            )
        self._first = found
        self._columns = functools.lru_cache(KEPT)(self._code)

    @property
    def name(self) -> str:
        return f"codes:{self.shards},{self.data},{self.distance},{self.weight},{self.degree}"

    @property
    def form(self) -> Form:
        return FORMS[self.style]

    @property
    def instruction(self) -> str:
        """What a graph's letters and numbers mean, what is asked for, and the form of the answer."""
        target = self._target
        checks, last = ascii_lowercase[: target.checks], self.shards - 1
        return (
            f"A binary code has {self.shards} shards, 0 to {last}, and {target.checks} checks, {checks[0]} to "
            f"{checks[-1]}. An edge such as {checks[0]}{last} says that shard {last} is in check {checks[0]}. The "
            f"problem gives all edges of the shards 0 to {self.shown - 1}. Give those of {self.shown} to {last}, "
            f"separated by commas, each once, without spaces. The checks must be independent, the distance at least "
            f"{self.distance}, every check in at most {self.weight} edges and every shard in at most {self.degree}. "
            f"{self.form.instruction}"
        )

    def problem(self, number: int) -> Problem:
        """Code ``number`` without its last shards, which are one of the right answers; ValueError if there is none."""
        if not 0 <= number < self.training + self.held_out:
            raise ValueError(f"{self.name} has no problem {number}")
        columns = self._columns(number)
        shown = _named(columns[: self.shown], 0)
        return Problem(number, f"{shown}=", _named(columns[self.shown :], self.shown))

    def score(self, problem: Problem, completion: str) -> float:
        """What the completed code is worth (:func:`~planaria.recovery.codes.search.worth`); 0 for a text that is no
        list of edges of the shards asked for, each named once."""
        edges = self._read(completion)
        if edges is None:
            return 0.0
        columns = [*self._columns(problem.number)[: self.shown], *[0] * (self.shards - self.shown)]
        for check, shard in edges:
            columns[shard] |= 1 << check
        return worth(self._target, gf2.transposed(columns, self._target.checks))

    def solution(self, problem: Problem, rng: random.Random) -> str:
        """The code that the problem was made from, its hidden shards in any order: all are alike to the checks."""
        return self.noisy_solution(problem, rng, 0.0)

    def noisy_solution(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """A solution in which each shard is with probability ``noise`` in checks that were drawn blindly."""
        hidden = list(self._columns(problem.number)[self.shown :])
        rng.shuffle(hidden)
        hidden = [rng.choice(self._vectors) if rng.random() < noise else column for column in hidden]
        return self.form.write("", _named(hidden, self.shown))

    def sound(self, problem: Problem, completion: str) -> bool:
        """Whether a completion is its edges in the order of shards and then of checks, and not a letter more.

        What they are worth is not looked at; ``score`` does that.
        """
        edges = self._read(completion)
        if edges is None:
            return False
        ordered = sorted(edges, key=lambda edge: (edge[1], edge[0]))
        return completion == self.form.write("", ",".join(_edge(*edge) for edge in ordered))

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the options, and of how problems are made."""
        said = (self.name, self.shown, self.training, self.held_out, TRIES, FIRST, FAVOUR)
        return records.fingerprint(KEY.decode(), (*map(str, said), *self.form.marks))

    def _read(self, completion: str) -> list[tuple[int, int]] | None:
        """The edges in the answer block; None unless they are names of edges asked for, each once, and nothing else."""
        parsed = parse(self.form, completion)
        if parsed is None or len(parsed.answer) > sum(map(len, self._edges)) + len(self._edges):
            return None
        names = parsed.answer.split(",")
        if len({*names}) < len(names) or not all(name in self._edges for name in names):
            return None
        return [self._edges[name] for name in names]

    def _code(self, number: int) -> tuple[int, ...]:
        """The columns of code ``number``, bits of checks. Where no order of its own leads to one, it is the first."""
        return next(filter(None, (self._tried(number, attempt) for attempt in range(TRIES))), self._first)

    def _tried(self, number: int, attempt: int) -> tuple[int, ...] | None:
        """The code that takes shards in one order, each that no few of those before add up to; None if it is none.

        Any distance − 1 of its columns are independent, which is what the distance means.
        """
        target, chosen, room = self._target, list[int](), [self.weight] * self._target.checks
        sums: list[set[int]] = [{0} for _ in range(self.distance - 1)]  # [j]: of at most j columns
        light_first = sorted(
            self._vectors, key=lambda vector: _drawn(vector, number, attempt) * FAVOUR ** vector.bit_count()
        )
        for vector in light_first:
            if vector in sums[-1] or any(vector >> check & 1 > left for check, left in enumerate(room)):
                continue
            for fewer, more in reversed([*pairwise(sums)]):
                more |= {vector ^ each for each in fewer}
            room = [left - (vector >> check & 1) for check, left in enumerate(room)]
            chosen.append(vector)
            if len(chosen) == target.shards:
                mixed = sorted(chosen, key=lambda vector: _drawn(number, vector))
                return tuple(mixed) if gf2.rank(chosen) == target.checks else None
        return None


def _drawn(*what: int) -> int:
    """64 bits that follow from some numbers, on every machine alike."""
    return int.from_bytes(hashlib.blake2b(f"{what}".encode(), digest_size=8, key=KEY).digest(), "little")


def _edge(check: int, shard: int) -> str:
    return f"{ascii_lowercase[check]}{shard}"


def _named(columns: Sequence[int], first: int) -> str:
    """The edges of shards ``first`` and those after it, in order."""
    checks = range(MAX_CHECKS)
    return ",".join(_edge(c, first + n) for n, column in enumerate(columns) for c in checks if column >> c & 1)
