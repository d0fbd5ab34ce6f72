"""What every scheme of gradient coding answers: who computes what in a round, and how a job's sum follows from it.

A *job* is one gradient that is wanted: the sum of its chunks' gradients. Job t begins in round t and is decoded by the
end of round t + T. In each round a worker runs some *mini-tasks* of equal load. A worker that is *late* in a round
loses all that it did in it.

Workers, jobs, rounds and chunks count from 0. All answers are functions of the history, that is, of who was late in
which round, so that a log replays them: no clock, no state. Jobs are assumed to be decoded by their deadlines, which
the wait-out sees to: whoever closes rounds waits for workers, one by one as they finish, until :meth:`Scheme.bears`
(or the published, stricter :meth:`Scheme.conforms`) holds for the history with those late who are still missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from planaria.config import bounds
from planaria.config.registry import Choice

Late = frozenset[int]
"""the workers whose work of one round is lost"""
History = Sequence[Late]
"""of the rounds so far, from the first"""
NOBODY: Late = frozenset()

Stragglers = Annotated[int, Field(ge=0), bounds.at_most(1 << 10, "there are no more replicas")]


@dataclass(frozen=True)
class Task:
    """One mini-task of a worker: a piece of a job, whose weighted gradients are added to one of the job's vectors."""

    job: int
    piece: int
    """which chunks with which weights, as :meth:`Scheme.parts` says"""
    vector: int = 0
    """of the worker's vectors for this job, that to which the gradients are added"""
    sent: bool = True
    """whether the vector is complete with this mini-task and is sent at the end of the round"""


@dataclass(frozen=True)
class Share:
    """A vector that a worker sent in time, and its coefficient in the job's sum."""

    worker: int
    round: int
    vector: int
    coefficient: float


Tasks = tuple[tuple[Task, ...], ...]
"""of each worker in turn"""


class Scheme(Choice, ABC):
    """One way; its fields are its options. ``n`` is the number of workers, of which each is a replica."""

    exact: ClassVar[bool] = True
    """whether decoding gives the sum, and not an estimate of it"""

    def objection(self, n: int) -> str:
        """Why this cannot serve n workers, with the mend; empty if it can."""
        return ""

    def delay(self) -> int:
        """T, in rounds."""
        return 0

    def slots(self) -> int:
        """Mini-tasks that a worker runs in a round, at most."""
        return 1

    def vectors(self) -> int:
        """Vectors of the model's size that a worker sends for a job when nobody is late."""
        return 1

    def chunks(self, n: int) -> int:
        """The equal microbatches that a job is made of; k times as many serve as well, k consecutive ones a chunk."""
        return n

    @abstractmethod
    def load(self, n: int) -> float:
        """L: the share of a job's chunks that a worker computes in a round, at most."""

    @abstractmethod
    def tasks(self, n: int, jobs: int, history: History) -> Tasks:
        """The mini-tasks of the round that follows ``history``, when so many jobs are wanted in all."""

    @abstractmethod
    def parts(self, n: int, worker: int, task: Task) -> tuple[tuple[int, float], ...]:
        """The job's chunks that a mini-task computes, in order, each with the weight of its gradient."""

    @abstractmethod
    def decodable(self, n: int, history: History, job: int) -> bool:
        """Whether what was sent in time determines the job's sum."""

    @abstractmethod
    def decode(self, n: int, history: History, job: int) -> tuple[Share, ...] | None:
        """The vectors whose sum, each times its coefficient, is that of the job's chunks; None if undecodable."""

    @abstractmethod
    def conforms(self, n: int, history: History) -> bool:
        """Whether the newest round leaves a pattern that the scheme is published to bear; earlier rounds did."""

    def busy(self, n: int, jobs: int, history: History) -> list[int]:
        """How many mini-tasks each worker has in the round that follows."""
        return [len(own) for own in self.tasks(n, jobs, history)]

    def bears(self, n: int, jobs: int, history: History) -> bool:
        """Whether every job that is under way is decoded in time if nobody is late from now on.

        Our weakest rule of wait-out: a round may close once this holds, because waiting for all in every later round
        is still possible then. Every history that conforms satisfies it. It is taken that the rounds before did.
        """
        if not history[-1]:
            return True
        newest, ahead = len(history) - 1, [*history, *[NOBODY] * self.delay()]
        under_way = range(max(0, newest - self.delay()), min(jobs, newest + 1))
        return all(self.decodable(n, ahead[: job + self.delay() + 1], job) for job in under_way)


class Uncoded(Scheme):
    """Worker i computes chunk i; a job takes all of them."""

    def load(self, n: int) -> float:
        """1 / n."""
        return 1 / n

    def tasks(self, n: int, jobs: int, history: History) -> Tasks:
        return ((Task(len(history), 0),) if len(history) < jobs else (),) * n

    def parts(self, n: int, worker: int, task: Task) -> tuple[tuple[int, float], ...]:
        return ((worker, 1.0),)

    def decodable(self, n: int, history: History, job: int) -> bool:
        return job < len(history) and not history[job]

    def decode(self, n: int, history: History, job: int) -> tuple[Share, ...] | None:
        return tuple(Share(i, job, 0, 1.0) for i in range(n)) if self.decodable(n, history, job) else None

    def conforms(self, n: int, history: History) -> bool:
        """Nobody is late."""
        return not history[-1]


class Dropping(Uncoded):
    """The slowest s are left out and the others' sum is scaled up: what the sum would be if chunks were alike.

    It is biased against the data of slow workers, so no recipe can choose it.
    """

    exact: ClassVar[bool] = False
    stragglers: Stragglers = 1
    """s, the workers that are left out at most"""

    def decodable(self, n: int, history: History, job: int) -> bool:
        return job < len(history) and len(history[job]) <= self.stragglers

    def decode(self, n: int, history: History, job: int) -> tuple[Share, ...] | None:
        if not self.decodable(n, history, job):
            return None
        there = [worker for worker in range(n) if worker not in history[job]]
        return tuple(Share(worker, job, 0, n / len(there)) for worker in there)

    def conforms(self, n: int, history: History) -> bool:
        return len(history[-1]) <= self.stragglers
