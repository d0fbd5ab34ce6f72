"""SPARe (arXiv 2603.00357), a rival in simulations: stacked shards, of which only as many as needed are computed.

Published: each of N workers holds a stack of r of the N shards of a job, placed cyclically, so that every shard lies in
r stacks. In a round all compute the first S shards of their stacks, at first S = 1. When workers die, the others
compute what is missing (the patch), and the order within stacks is changed so that the first S again cover all shards
with the least S, found by bipartite matching; no shard is sent anywhere. When a shard's r holders are all dead, the run
restarts. Reordering for the fewest moves and the choice of a checkpoint interval, which the paper has too, change no
time here and are left out.

Our derivation, where the paper speaks of deaths alone: who is late in a round is treated as dead until its end. At the
deadline, or as soon as those that are there can, the others begin the patch, the late ones go on, and each shard is
taken from whoever has it first. Shards are spread over stacks at distances that differ in pairs, as far as N allows, so
that two workers share few shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import floor, gamma, log2

import numpy as np

from planaria.exchange.coded.simulate import Profile, Seconds, close

Owners = dict[int, int]
"""shard → who computes it"""


def endured(n: int, stack: int) -> float:
    """Deaths in random order up to and with the first that leaves a shard without holder, in the mean.

    µ(N, r) ≈ Γ(1/r) / r · N^(1 − 1/r), arXiv 2603.00357.
    """
    return float(gamma(1 / stack) / stack * n ** (1 - 1 / stack))


def best_stack(n: int) -> int:
    """r* ≈ ⌊log₂ N + 0.833⌋, arXiv 2603.00357."""
    return floor(log2(n) + 0.833)


@lru_cache
def distances(n: int, stack: int) -> tuple[int, ...]:
    """Where the shards of a stack lie, from the worker's own on: pairwise differences mod n differ while they can."""
    found, seen = [0], set[int]()
    for spread in (True, False):
        for place in range(1, n):
            new = {(sign * (place - other)) % n for other in found for sign in (1, -1)}
            if len(found) == stack or place in found or (spread and (len(new) < 2 * len(found) or new & seen)):
                continue
            found.append(place)
            seen |= new
    return tuple(found)


def holders(n: int, stack: int, shard: int) -> list[int]:
    """Whose stacks have the shard."""
    return [(shard - distance) % n for distance in distances(n, stack)]


def cover(n: int, stack: int, shards: Collection[int], there: Collection[int]) -> tuple[int, Owners] | None:
    """The least depth S at which workers that are there cover the shards, each at most S, and who computes which.

    None if no stack that is there has one of them.
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
    """Give the shard an owner, by moving others where that is needed: one augmenting path."""
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
class Stacked:
    """How rounds went."""

    rounds: tuple[float, ...]
    restarts: int
    depths: tuple[int, ...]
    """S of each round, before its patch"""

    @property
    def seconds(self) -> float:
        return sum(self.rounds)


def stacked(
    profile: Profile,
    jobs: int,
    stack: int,
    *,
    slow: float = 2.0,
    start: int = 0,
    deaths: Mapping[int, Collection[int]] | None = None,
    restart_s: float = 0.0,
) -> Stacked:
    """So many jobs, one a round, with workers of whom ``deaths`` says who dies in which round (from 0).

    A death that leaves a shard without holder costs the round, ``restart_s``, and a new cut to those who live: a run
    of fewer workers, each with a larger share.
    """
    living, rounds, depths, restarts, done = list(range(profile.workers)), list[float](), list[int](), 0, 0
    cut, placed = living, _placed(living, stack, living)
    for now in range(jobs + profile.workers):
        if done == jobs:
            break
        died = set((deaths or {}).get(now, ())) & set(living)
        if not (left := [worker for worker in living if worker not in died]):
            raise ValueError("nobody is left")
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
    return Stacked(tuple(rounds), restarts, tuple(depths))


def _placed(
    cut: list[int], stack: int, living: Collection[int], shards: Collection[int] | None = None
) -> tuple[int, Owners] | None:
    """As :func:`cover`, for a job cut for the workers ``cut``, of whom some live; owners by their own numbers."""
    n = len(cut)
    places = [place for place, worker in enumerate(cut) if worker in living]
    found = cover(n, min(stack, n), range(n) if shards is None else shards, places)
    return found and (found[0], {shard: cut[place] for shard, place in found[1].items()})


def _round(
    profile: Profile,
    now: int,
    cut: list[int],
    stack: int,
    living: list[int],
    died: Collection[int],
    owners: Owners,
    depth: int,
    slow: float,
) -> float | None:
    """When a round has all shards; None if nobody can patch a dead worker's."""
    finish: Seconds = profile.at(now, np.full(profile.workers, depth / len(cut)))
    one: Seconds = profile.at(now, np.full(profile.workers, 1 / len(cut)))
    finish[list(died)] = np.inf

    def patch(late: Collection[int]) -> tuple[int, Owners] | None:
        missing = [shard for shard, owner in owners.items() if owner in late]
        return _placed(cut, stack, [worker for worker in living if worker not in late], missing)

    late, begins = close(finish, living, slow, lambda late: patch(late) is not None)
    if np.isinf(begins) or (found := patch(late)) is None:
        return None
    if not found[1]:
        return float(max(finish[worker] for worker in living if worker not in late))
    busy, done = dict.fromkeys(living, begins), list[float]()
    for shard, owner in found[1].items():
        busy[owner] += float(one[owner])
        done.append(min(busy[owner], float(finish[owners[shard]])))
    return max(done)
