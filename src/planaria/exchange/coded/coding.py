"""A scheme at work in a run: among so many replicas, over the jobs of one step.

A step's microbatches are cut into ``jobs`` gradients of equal weight, so that jobs do not wait for one another; a step
takes ``jobs`` + T rounds, in the last T of which what is open is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from planaria.config.schema import ExchangeConfig
from planaria.exchange.coded.base import History, Late, Scheme, Task
from planaria.exchange.coded.schemes import Coded, coded_of

Counted = tuple[frozenset[int], ...]
"""of each round that is over, the replicas whose results count"""


class Sent(NamedTuple):
    """A vector that a replica sent in a round of a step."""

    replica: int
    round: int
    job: int
    vector: int


class Duty(NamedTuple):
    """One mini-task of a replica."""

    task: Task
    chunks: tuple[tuple[int, float], ...]
    """of the step, counted through all its jobs, in order, each with its weight"""


@dataclass(frozen=True)
class Coding:
    """Pure: all who know who counted in the rounds so far know what is to be done in the next."""

    coded: Coded
    replicas: int

    @property
    def scheme(self) -> Scheme:
        """Who computes what."""
        return self.coded.scheme

    @property
    def jobs(self) -> int:
        """Of a step."""
        return self.coded.jobs

    @property
    def slow(self) -> float:
        """Times what a round's fastest replica took, after which the others are late."""
        return self.coded.slow

    @property
    def rounds(self) -> int:
        """Of a step."""
        return self.jobs + self.scheme.delay()

    @property
    def chunks(self) -> int:
        """Of a step: equal parts of its microbatches."""
        return self.jobs * self.scheme.chunks(self.replicas)

    def late(self, counted: frozenset[int]) -> Late:
        """Those whose work of a round is lost, if these count."""
        return frozenset(range(self.replicas)) - counted

    def history(self, counted: Counted) -> History:
        """The same as schemes take it."""
        return [self.late(there) for there in counted]

    def duties(self, counted: Counted, replica: int) -> list[Duty]:
        """What ``replica`` does in the next round."""
        size = self.scheme.chunks(self.replicas)
        tasks = self.scheme.tasks(self.replicas, self.jobs, self.history(counted))[replica]
        parts = [(task, self.scheme.parts(self.replicas, replica, task)) for task in tasks]
        return [Duty(t, tuple((t.job * size + chunk, weight) for chunk, weight in found)) for t, found in parts]

    def busy(self, counted: Counted) -> frozenset[int]:
        """The replicas that have something to do in the next round."""
        found = self.scheme.busy(self.replicas, self.jobs, self.history(counted))
        return frozenset(replica for replica, tasks in enumerate(found) if tasks)

    def may_close(self, counted: Counted, done: frozenset[int], late: bool) -> bool:
        """May the next round end with the results of those that are ``done``?

        Not before it is ``late`` if whoever is left out has to make up for it.
        """
        missing = self.late(done)
        if not missing:
            return True
        if self.scheme.delay() and not late:
            return False
        return self.scheme.bears(self.replicas, self.jobs, [*self.history(counted), missing])

    def admitted(self, counted: Counted, order: Sequence[int], late: int) -> frozenset[int]:
        """Who counts in the next round where replicas finish in this ``order``, the last so many of them late."""
        there = len(order) - late
        while not self.may_close(counted, frozenset(order[:there]), late=True):
            there += 1
        return frozenset(order[:there])

    def decoding(self, counted: Counted) -> list[tuple[Sent, float]]:
        """What a step whose rounds are over comes to: vectors, and the coefficient of each, in the order of adding."""
        found, history = list[tuple[Sent, float]](), self.history(counted)
        for job in range(self.jobs):
            shares = self.scheme.decode(self.replicas, history[: job + self.scheme.delay() + 1], job)
            assert shares is not None, f"job {job} cannot be decoded from {counted}"
            found += [(Sent(s.worker, s.round, job, s.vector), s.coefficient) for s in shares]
        return found


@lru_cache
def coding_of(config: ExchangeConfig) -> Coding | None:
    """What ``exchange.coded`` names, for as many replicas as there are; None where it names nothing.

    :raises UserError: naming what is unknown or does not go together.
    """
    return Coding(coded_of(config.coded, config.replicas), config.replicas) if config.coded else None
