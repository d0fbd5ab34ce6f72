"""Simulation of schemes: replay of measured finish times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

import numpy as np
from numpy.typing import NDArray

from planaria.exchange.coded.base import Late, Scheme

Seconds = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FinishTimes:
    """Finish times of each worker in each round of a probe with equal loads."""

    seconds: Seconds
    """[rounds, n], from the start of the round"""
    load: float
    """share of a job's data that each worker computed; uncoded 1/n"""
    slope: float
    """seconds per unit of load for an undelayed worker; 0: all cost is fixed"""
    task_s: float = 0.0
    """seconds of each mini-task independent of its load, such as filling and draining a pipeline"""

    @property
    def workers(self) -> int:
        return int(self.seconds.shape[1])

    @cached_property
    def typical(self) -> float:
        """The median finish time."""
        return float(np.median(self.seconds))

    def finish_times(self, round: int, loads: Seconds) -> Seconds:
        """Return finish times of a round with these loads [n]; rounds past the last wrap around.

        A slow round multiplies the time of more load; as published, it adds the same seconds to any load.
        """
        measured = self.seconds[round % len(self.seconds)]
        more = self.slope * (loads - self.load)
        return np.asarray(np.maximum(measured * (1 + more / self.typical), 1e-9))

    def cut(self, jobs: int, into: int) -> FinishTimes:
        """Return the profile of steps of ``jobs`` jobs cut ``into`` another number: merged, or split equally."""
        common = lcm(jobs, into)
        parts = np.repeat(np.maximum(self.seconds - self.task_s, 0.0) / (common // jobs), common // jobs, axis=0)
        size = common // into
        whole = len(parts) // size * size
        seconds = parts[:whole].reshape(-1, size, self.workers).sum(axis=1) + self.task_s
        return replace(self, seconds=seconds, slope=self.slope * jobs / into)

    def without(self, workers: Sequence[int]) -> FinishTimes:
        """Return the other workers' rounds."""
        kept = np.delete(self.seconds, list(workers), axis=1)
        return replace(self, seconds=kept)


@dataclass(frozen=True)
class ReplayedRounds:
    """Timing of rounds under a scheme."""

    rounds: tuple[float, ...]
    """seconds of each"""
    history: tuple[Late, ...]
    waits: int
    """workers awaited past the deadline of their round"""
    work: float
    """shares of a job's data that the mean worker computed, over all rounds"""

    @property
    def seconds(self) -> float:
        return sum(self.rounds)


def time_round(
    finish: Seconds, busy: Sequence[int], slow: float, allowed: Callable[[Late], bool]
) -> tuple[Late, float]:
    """Return the late workers of a round and the time of its end.

    κ is the fastest finish time. After ``slow`` · κ, that is (1+µ)κ, busy workers are late if ``allowed``; otherwise
    the next to finish is awaited until they are (arXiv 2211.13802; one by one is ours).
    """
    order = sorted(busy, key=lambda worker: (finish[worker], worker))
    deadline = slow * finish[order[0]]
    arrived = sum(finish[worker] <= deadline for worker in order)
    ends = deadline
    while arrived < len(order) and not allowed(frozenset(order[arrived:])):
        ends = finish[order[arrived]]
        arrived += 1
    late = frozenset(order[arrived:])
    return late, float(ends if late else finish[order[-1]])


def replay(
    scheme: Scheme,
    profile: FinishTimes,
    jobs: int,
    *,
    slow: float = 2.0,
    start: int = 0,
    published: bool = False,
) -> ReplayedRounds:
    """Simulate ``jobs`` jobs in jobs + T rounds, the first of which is round ``start`` of the profile.

    A round may close once every job can still be decoded. With T = 0 late workers lose nothing, and no deadline keeps a
    round open. A worker without mini-tasks costs nothing, for example in the first and last rounds.

    :param published: use the published accounting: conforming patterns, deadlines in all rounds, full load for all.
    """
    n = profile.workers
    history: list[Late] = []
    spent = []
    waits, work = 0, 0.0
    each = scheme.load(n) / scheme.slots()
    for now in range(jobs + scheme.delay()):
        counts = scheme.busy(n, jobs, history)
        busy = [worker for worker in range(n) if counts[worker]]
        if not busy:
            history.append(frozenset())
            continue
        loads = np.full(n, scheme.load(n)) if published else each * np.array(counts)
        finish = profile.finish_times(start + now, loads)
        if profile.task_s:
            finish = finish + profile.task_s * np.maximum(np.array(counts) - 1, 0)
        patience = slow if published or scheme.delay() else 1.0
        late, ends = time_round(
            finish, busy, patience, lambda late: _may_close(scheme, n, jobs, [*history, late], published)
        )
        waits += sum(finish[worker] > patience * finish[busy].min() for worker in busy if worker not in late)
        work += float(loads[busy].sum()) / n
        history.append(late)
        spent.append(ends)
    return ReplayedRounds(tuple(spent), tuple(history), waits, work)


def _may_close(scheme: Scheme, n: int, jobs: int, history: list[Late], published: bool) -> bool:
    return scheme.conforms(n, history) if published else scheme.tolerates_losses(n, jobs, history)


def windows(
    scheme: Scheme, profile: FinishTimes, jobs: int, count: int, *, slow: float = 2.0, published: bool = False
) -> list[float]:
    """Return the seconds of each of ``count`` consecutive steps whose microbatches are split into ``jobs``."""
    rounds = jobs + scheme.delay()
    return [
        replay(scheme, profile, jobs, slow=slow, start=k * rounds, published=published).seconds for k in range(count)
    ]


def uncoded_seconds(profile: FinishTimes, jobs: int, count: int) -> list[float]:
    """Return the seconds of these steps without a code, with waits only at the end of a step: max_i Σ_j t_ij.

    This is all-reduce once per step; short delays of different workers do not add up.
    """
    loads = np.full(profile.workers, 1 / profile.workers)
    sums = (sum(profile.finish_times(k * jobs + now, loads) for now in range(jobs)) for k in range(count))
    return [float(np.max(worker_sums)) for worker_sums in sums]
