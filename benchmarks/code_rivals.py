"""What a policy that completes codes is held against: searches that pay for every reward that they look at.

Each knows the form of an answer and the bound on a shard's checks, so no text of theirs is refused. ``greedy`` knows
more: it looks at no reward at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from string import ascii_lowercase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planaria.swarm.tasks.base import Problem
    from planaria.swarm.tasks.codes import Codes

Columns = list[int]
"""of the hidden shards, each the bits of its checks"""
Search = Callable[["Codes", "Problem", random.Random], Iterator[float]]
"""the rewards that it looks at, one after the other, without end"""
PATIENCE = 40
"""changes without a gain after which a climb begins anew"""


def text(task: Codes, columns: Sequence[int]) -> str:
    edges = [
        f"{ascii_lowercase[c]}{task.shown + n}"
        for n, column in enumerate(columns)
        for c in range(12)
        if column >> c & 1
    ]
    return task.form.write("", ",".join(edges))


def vectors(task: Codes) -> list[int]:
    """All sets of checks that a shard may be in."""
    return [v for v in range(1, 1 << task.shards - task.data) if v.bit_count() <= task.degree]


def drawn(task: Codes, rng: random.Random) -> Columns:
    return [rng.choice(vectors(task)) for _ in range(task.shards - task.shown)]


def blind(task: Codes, problem: Problem, rng: random.Random) -> Iterator[float]:
    """Any shards."""
    while True:
        yield task.score(problem, text(task, drawn(task, rng)))


def climb(task: Codes, problem: Problem, rng: random.Random, patience: int = PATIENCE) -> Iterator[float]:
    """From any shards on, an edge is turned over or a shard drawn anew, and kept unless that is worth less."""
    while True:
        columns = drawn(task, rng)
        now = task.score(problem, text(task, columns))
        yield now
        idle = 0
        while idle < patience:
            changed, place = list(columns), rng.randrange(len(columns))
            if rng.random() < 0.5:
                changed[place] ^= 1 << rng.randrange(task.shards - task.data)
            else:
                changed[place] = rng.choice(vectors(task))
            found = task.score(problem, text(task, changed))
            yield found
            idle = 0 if found > now else idle + 1
            if found >= now:
                columns, now = changed, found


def best(search: Search, task: Codes, problem: Problem, rng: random.Random, looks: int) -> float:
    """The best reward of so many; a search ends with the first that is 1."""
    found = 0.0
    for reward in islice(search(task, problem, rng), looks):
        found = max(found, reward)
        if found == 1:
            break
    return found


def greedy(task: Codes, shown: Sequence[int], rng: random.Random) -> Columns | None:
    """Shard by shard, any that no few others add up to and that checks have room for; None where none is left."""
    columns, room = [], [task.weight - sum(v >> c & 1 for v in shown) for c in range(task.shards - task.data)]
    for _ in range(task.shards - task.shown):
        sums = {0}
        for _few in range(task.distance - 2):
            sums |= {v ^ each for v in [*shown, *columns] for each in sums}
        fit = [v for v in vectors(task) if v not in sums and all(left >= (v >> c & 1) for c, left in enumerate(room))]
        if not fit:
            return None
        light = min(v.bit_count() for v in fit)
        column = rng.choice([v for v in fit if v.bit_count() == light])
        columns.append(column)
        room = [left - (column >> c & 1) for c, left in enumerate(room)]
    return columns
