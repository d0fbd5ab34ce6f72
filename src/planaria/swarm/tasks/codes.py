"""Codes of sparse parity checks: complete a Tanner graph so that the code reaches its distance.

    a0,b0,c1,d1,a2,c2,b3,d3=  →  [a4,d4,b5,c5,a6,b6,c6,a7,b7,d7]

Letters are checks, numbers are shards; an edge puts a shard into a check. The problem shows the edges of the first
shards, the completion names the others. Any valid completion is accepted: its reward is the worth of the resulting
code, counted by enumeration (``recovery/codes/search.py``).
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
from planaria.recovery.codes.search import SearchTarget, survival_score
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import FORMS, AnswerMarks, Style, parse
from planaria.swarm.tasks.base import ErringTask, TaskProblem

KEY = b"planaria codes 1"  # determines the problems and the fingerprint
MAX_CHECKS = 12
"""limit for short texts and a table of all sums of few columns"""
TRIES, FIRST = 64, 1000
"""orders of shards tried per problem, and for the first problem, which proves that the task is possible"""
FAVOUR = 4
"""factor by which a shard with one check fewer comes earlier, in the median; heavy shards are numerous"""
CACHED = 4096
"""cached problems"""


class Codes(ErringTask):
    """Codes of ``shards`` of which ``data`` are data, with ``distance`` and checks of at most ``weight`` shards.

    A problem is a code built shard by shard in a random order that shows ``shown`` of them. Problems are drawn at
    random, so with few shards a held-out problem may also occur in training.
    """

    shards: int = 8
    data: int = 4
    distance: Annotated[int, Field(ge=2)] = 3
    weight: int = 4
    degree: Annotated[int, Field(ge=1)] = 3
    """maximum checks of a shard"""
    shown: Annotated[int, Field(ge=1)] = 4
    """shards whose edges the problem shows"""
    style: Style = "brackets"
    training: ClassVar[int] = 9_000
    held_out: ClassVar[int] = 1_000
    _target: SearchTarget
    _vectors: tuple[int, ...]
    _edges: dict[str, tuple[int, int]]
    _columns: Callable[[int], tuple[int, ...]]
    _first: tuple[int, ...]

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: if letters run out, a bound excludes the code, or the search finds none."""
        self._target = SearchTarget(self.shards, self.data, self.distance, self.weight, self.degree)
        checks = self._target.checks
        if checks > MAX_CHECKS:
            raise UserError(f"task {self.name}: {checks} checks; the limit is {MAX_CHECKS}; use fewer shards")
        if self.shown >= self.shards:
            raise UserError(f"task {self.name}: shown = {self.shown} of {self.shards} shards leaves none to write")
        self._vectors = tuple(vector for vector in range(1, 1 << checks) if vector.bit_count() <= self.degree)
        self._edges = {_edge(c, s): (c, s) for s in range(self.shown, self.shards) for c in range(checks)}
        result = next(filter(None, (self._build_code(0, attempt) for attempt in range(FIRST))), None)
        if result is None:
            raise UserError(
                f"task {self.name}: no code was found in {FIRST} tries; increase weight or degree, or reduce distance"
            )
        self._first = result
        self._columns = functools.lru_cache(CACHED)(self._build_columns)

    @property
    def name(self) -> str:
        return f"codes:{self.shards},{self.data},{self.distance},{self.weight},{self.degree}"

    @property
    def form(self) -> AnswerMarks:
        return FORMS[self.style]

    @property
    def instruction(self) -> str:
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

    def problem(self, number: int) -> TaskProblem:
        """Return code ``number`` without its last shards, which form one of the right answers."""
        self.check_number(number)
        columns = self._columns(number)
        shown = _edge_list(columns[: self.shown], 0)
        return TaskProblem(number, f"{shown}=", _edge_list(columns[self.shown :], self.shown))

    def score(self, problem: TaskProblem, completion: str) -> float:
        """Return the completed code's worth; 0 for a text that does not list distinct edges of the hidden shards."""
        edges = self._parse_edges(completion)
        if edges is None:
            return 0.0
        columns = [*self._columns(problem.number)[: self.shown], *[0] * (self.shards - self.shown)]
        for check, shard in edges:
            columns[shard] |= 1 << check
        return survival_score(self._target, gf2.transpose(columns, self._target.checks))

    def noisy_solution(self, problem: TaskProblem, rng: random.Random, noise: float) -> str:
        """Return a solution in which each shard has random checks with probability ``noise``."""
        hidden = list(self._columns(problem.number)[self.shown :])
        rng.shuffle(hidden)
        hidden = [rng.choice(self._vectors) if rng.random() < noise else column for column in hidden]
        return self.form.write("", _edge_list(hidden, self.shown))

    def sound(self, problem: TaskProblem, completion: str) -> bool:
        """Return whether a completion is a list of edges ordered by shard and check, whatever their worth."""
        edges = self._parse_edges(completion)
        if edges is None:
            return False
        ordered = sorted(edges, key=lambda edge: (edge[1], edge[0]))
        return completion == self.form.write("", ",".join(_edge(*edge) for edge in ordered))

    @property
    def fingerprint(self) -> str:
        constants = (self.name, self.shown, self.training, self.held_out, TRIES, FIRST, FAVOUR)
        return records.fingerprint(KEY.decode(), (*map(str, constants), *self.form.marks))

    def _parse_edges(self, completion: str) -> list[tuple[int, int]] | None:
        """Return the answer's edges, or None unless it is a list of distinct edges of hidden shards."""
        parsed = parse(self.form, completion)
        if parsed is None or len(parsed.answer) > sum(map(len, self._edges)) + len(self._edges):
            return None
        names = parsed.answer.split(",")
        if len({*names}) < len(names) or not all(name in self._edges for name in names):
            return None
        return [self._edges[name] for name in names]

    def _build_columns(self, number: int) -> tuple[int, ...]:
        """Return the columns of code ``number``, bits of checks; the first code if no order yields one."""
        return next(filter(None, (self._build_code(number, attempt) for attempt in range(TRIES))), self._first)

    def _build_code(self, number: int, attempt: int) -> tuple[int, ...] | None:
        """Return the code built from shards in one order, or None if the order yields none.

        Each added shard is not a sum of fewer than distance − 1 earlier ones, so any distance − 1 columns are
        independent.
        """
        target = self._target
        chosen = list[int]()
        room = [self.weight] * self._target.checks
        sums: list[set[int]] = [{0} for _ in range(self.distance - 1)]  # [j]: of at most j columns
        light_first = sorted(
            self._vectors, key=lambda vector: _pseudorandom(vector, number, attempt) * FAVOUR ** vector.bit_count()
        )
        for vector in light_first:
            if vector in sums[-1] or any(vector >> check & 1 > left for check, left in enumerate(room)):
                continue
            for fewer, more in reversed([*pairwise(sums)]):
                more |= {vector ^ each for each in fewer}
            room = [left - (vector >> check & 1) for check, left in enumerate(room)]
            chosen.append(vector)
            if len(chosen) == target.shards:
                mixed = sorted(chosen, key=lambda vector: _pseudorandom(number, vector))
                return tuple(mixed) if gf2.rank(chosen) == target.checks else None
        return None


def _pseudorandom(*what: int) -> int:
    """Return 64 bits derived from some numbers, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{what}".encode(), digest_size=8, key=KEY).digest(), "little")


def _edge(check: int, shard: int) -> str:
    return f"{ascii_lowercase[check]}{shard}"


def _edge_list(columns: Sequence[int], first: int) -> str:
    checks = range(MAX_CHECKS)
    return ",".join(_edge(c, first + n) for n, column in enumerate(columns) for c in checks if column >> c & 1)
