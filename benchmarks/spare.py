"""SPARe (arXiv 2603.00357), a rival in simulations: stacked shards, of which only as many as needed are computed.

Published: each of N workers holds a stack of r of the N shards of a job, placed cyclically, so that every shard is in r
stacks. In a round all compute the first S shards of their stacks, initially S = 1. When workers die, the others compute
the missing shards (the patch), and stacks are reordered so that the first S cover all shards again with the least S,
found by bipartite matching; no shard is sent. When all r holders of a shard are dead, the run restarts. The paper's
reordering with the fewest moves and its checkpoint interval do not affect times here and are left out.

Ours, where the paper covers only deaths: a late worker counts as dead until the end of the round. At the deadline, or
as soon as the present workers can, the others start the patch, late ones continue, and the first result of each shard
counts. The distances of a stack's shards differ pairwise as far as N allows, so that two workers share few shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import floor, gamma, log2

import numpy as np

from planaria.exchange.coded.simulate import FinishTimes, Seconds, close_round

Owners = dict[int, int]
"""shard → worker that computes it"""


def endured(n: int, stack: int) -> float:
    """Return the mean number of deaths in random order until a shard has no holder."""
    return float(gamma(1 / stack) / stack * n ** (1 - 1 / stack))


def best_stack(n: int) -> int:
    """r* ≈ ⌊log₂ N + 0.833⌋, arXiv 2603.00357."""
    return floor(log2(n) + 0.833)


@lru_cache
def distances(n: int, stack: int) -> tuple[int, ...]:
    """Return the offsets of a stack's shards from the worker's own; pairwise differences mod n are distinct while
    possible."""
    results, seen = [0], set[int]()
    for spread in (True, False):
        for index in range(1, n):
            new = {(sign * (index - other)) % n for other in results for sign in (1, -1)}
            if len(results) == stack or index in results or (spread and (len(new) < 2 * len(results) or new & seen)):
                continue
            results.append(index)
            seen |= new
    return tuple(results)


def holders(n: int, stack: int, shard: int) -> list[int]:
    """Return the workers whose stacks contain the shard."""
    return [(shard - distance) % n for distance in distances(n, stack)]


def cover(n: int, stack: int, shards: Collection[int], there: Collection[int]) -> tuple[int, Owners] | None:
    """Return the least depth S at which workers in ``there`` cover the shards, each at most S, and their assignment.

    None if a shard is in no stack of ``there``.
    """
    there = set(there)
    within = {shard: [worker for worker in holders(n, stack, shard) if worker in there] for shard in shards}
    if not all(within.values()):
        return None
    for depth in range(1, n + 1):
        owners: Owners = {}
        if all(_augment(shard, within, depth, owners, set()) for shard in shards):
            return depth, owners
    raise AssertionError("n shards fit on one worker")


def _augment(shard: int, within: Mapping[int, list[int]], depth: int, owners: Owners, visited: set[int]) -> bool:
    """Assign an owner to the shard along one augmenting path, moving other shards if needed."""
    for worker in within[shard]:
        if worker in visited:
            continue
        visited.add(worker)
        held = [other for other, owner in owners.items() if owner == worker]
        if len(held) < depth:
            owners[shard] = worker
            return True
        for other in held:
            if _augment(other, within, depth, owners, visited):
                owners[shard] = worker
                return True
    return False


@dataclass(frozen=True)
class StackedRounds:
    """Timing of rounds."""

    rounds: tuple[float, ...]
    restarts: int
    depths: tuple[int, ...]
    """S of each round before its patch"""

    @property
    def seconds(self) -> float:
        return sum(self.rounds)


def stacked(
    profile: FinishTimes,
    jobs: int,
    stack: int,
    *,
    slow: float = 2.0,
    start: int = 0,
    deaths: Mapping[int, Collection[int]] | None = None,
    restart_s: float = 0.0,
) -> StackedRounds:
    """Simulate ``jobs`` jobs, one per round, with ``deaths``: round → workers that die in it.

    A death that leaves a shard without holder costs the round and ``restart_s``; the run continues with fewer workers,
    each with a larger share.
    """
    living, rounds, depths, restarts, done = list(range(profile.workers)), list[float](), list[int](), 0, 0
    cut, placed = living, _placed(living, stack, living)
    for now in range(jobs + profile.workers):
        if done == jobs:
            break
        died = set((deaths or {}).get(now, ())) & set(living)
        if not (left := [worker for worker in living if worker not in died]):
            raise ValueError("no worker is left")
        assert placed is not None
        depth, owners = placed
        ends = _round(profile, start + now, cut, stack, living, died, owners, depth, slow)
        depths.append(depth)
        living, placed = left, _placed(cut, stack, left) if died else placed
        if ends is None or placed is None:
            seconds = profile.at(start + now, np.full(profile.workers, depth / len(cut)))
            rounds.append(slow * float(seconds[left].min()) + restart_s)
            cut, placed, restarts = left, _placed(left, stack, left), restarts + 1
        else:
            rounds.append(ends)
            done += 1
    return StackedRounds(tuple(rounds), restarts, tuple(depths))


def _placed(
    cut: list[int], stack: int, living: Collection[int], shards: Collection[int] | None = None
) -> tuple[int, Owners] | None:
    """As :func:`cover`, for a job split among the workers ``cut``, of which ``living`` remain; owners by their own
    numbers."""
    n = len(cut)
    indices = [index for index, worker in enumerate(cut) if worker in living]
    result = cover(n, min(stack, n), range(n) if shards is None else shards, indices)
    return result and (result[0], {shard: cut[index] for shard, index in result[1].items()})


def _round(
    profile: FinishTimes,
    now: int,
    cut: list[int],
    stack: int,
    living: list[int],
    died: Collection[int],
    owners: Owners,
    depth: int,
    slow: float,
) -> float | None:
    """Return the time at which a round has all shards; None if no worker can patch a dead one's."""
    finish: Seconds = profile.at(now, np.full(profile.workers, depth / len(cut)))
    one: Seconds = profile.at(now, np.full(profile.workers, 1 / len(cut)))
    finish[list(died)] = np.inf

    def patch(late: Collection[int]) -> tuple[int, Owners] | None:
        missing = [shard for shard, owner in owners.items() if owner in late]
        return _placed(cut, stack, [worker for worker in living if worker not in late], missing)

    late, begins = close_round(finish, living, slow, lambda late: patch(late) is not None)
    if np.isinf(begins) or (result := patch(late)) is None:
        return None
    if not result[1]:
        return float(max(finish[worker] for worker in living if worker not in late))
    busy, done = dict.fromkeys(living, begins), list[float]()
    for shard, owner in result[1].items():
        busy[owner] += float(one[owner])
        done.append(min(busy[owner], float(finish[owners[shard]])))
    return max(done)
