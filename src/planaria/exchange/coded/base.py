"""Interface of gradient coding schemes: each worker's tasks in a round, and the decoding of a job's sum.

A *job* is one gradient: the sum of its chunks' gradients. Job t starts in round t and is decoded by the end of round t
+ T. In each round a worker runs some *mini-tasks* of equal load. A worker that is *late* in a round loses its work of
that round.

Workers, jobs, rounds and chunks are numbered from 0. All methods are functions of the history, the late workers of each
round, so that a log replays them. Jobs are decoded by their deadlines because a round stays open for workers, one by
one as they finish, until :meth:`Scheme.tolerates_losses` (or the published, stricter :meth:`Scheme.conforms`)
holds for the history in which the missing workers are late.
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
"""workers whose work of one round is lost"""
History = Sequence[Late]
"""late workers of all rounds so far"""
NOBODY: Late = frozenset()

Stragglers = Annotated[int, Field(ge=0), bounds.at_most(1 << 10, "a run has at most as many replicas")]


@dataclass(frozen=True)
class MiniTask:
    """One mini-task of a worker: a piece of a job, whose weighted gradients are added to one of the job's vectors."""

    job: int
    piece: int
    """chunks and weights, as in :meth:`Scheme.parts`"""
    vector: int = 0
    """number of the worker's vector for this job that receives the gradients"""
    sent: bool = True
    """whether this mini-task completes the vector, which is then sent at the end of the round"""


@dataclass(frozen=True)
class CodedVector:
    """A vector that a worker sent in time, and its coefficient in the job's sum."""

    worker: int
    round: int
    vector: int
    coefficient: float


Tasks = tuple[tuple[MiniTask, ...], ...]
"""mini-tasks of each worker"""


class Scheme(Choice, ABC):
    """A coding scheme; its fields are its options. ``n`` is the number of workers, each a replica."""

    exact: ClassVar[bool] = True
    """whether decoding returns the exact sum instead of an estimate"""

    def why_unsupported(self, n: int) -> str:
        """Return why the scheme does not support n workers, with a fix, or an empty string if it does."""
        return ""

    def delay(self) -> int:
        """Return T, in rounds."""
        return 0

    def slots(self) -> int:
        """Return the largest number of mini-tasks of a worker in a round."""
        return 1

    def vectors(self) -> int:
        """Vectors of the model's size that a worker sends for a job if no worker is late."""
        return 1

    def chunks(self, n: int) -> int:
        """Return the number of equal microbatches of a job; also k times as many, k consecutive ones a chunk."""
        return n

    @abstractmethod
    def load(self, n: int) -> float:
        """Return L: the largest share of a job's chunks that a worker computes in a round."""

    @abstractmethod
    def tasks(self, n: int, jobs: int, history: History) -> Tasks:
        """Return the mini-tasks of the round after ``history`` for a total of ``jobs``."""

    @abstractmethod
    def parts(self, n: int, worker: int, task: MiniTask) -> tuple[tuple[int, float], ...]:
        """Return the chunks of a mini-task, in order, each with the weight of its gradient."""

    @abstractmethod
    def decodable(self, n: int, history: History, job: int) -> bool:
        """Return whether the vectors sent in time determine the job's sum."""

    @abstractmethod
    def decode(self, n: int, history: History, job: int) -> tuple[CodedVector, ...] | None:
        """Return the vectors and coefficients whose sum is the job's gradient, or None if undecodable."""

    @abstractmethod
    def conforms(self, n: int, history: History) -> bool:
        """Return whether the newest round completes a pattern that the scheme tolerates as published; earlier rounds
        did."""

    def busy(self, n: int, jobs: int, history: History) -> list[int]:
        """Return the number of mini-tasks of each worker in the next round."""
        return [len(tasks) for tasks in self.tasks(n, jobs, history)]

    def tolerates_losses(self, n: int, jobs: int, history: History) -> bool:
        """Return whether all open jobs are decoded in time if no worker is late from now on.

        The weakest rule of wait-out [ours]: a round may close once this holds, since waiting for all in later rounds
        remains possible. Every history that conforms satisfies it. Assumes that earlier rounds did.
        """
        if not history[-1]:
            return True
        newest, ahead = len(history) - 1, [*history, *[NOBODY] * self.delay()]
        under_way = range(max(0, newest - self.delay()), min(jobs, newest + 1))
        return all(self.decodable(n, ahead[: job + self.delay() + 1], job) for job in under_way)


class OneRoundScheme(Scheme, ABC):
    """A scheme in which each worker has one mini-task of each job, in the job's own round."""

    def tasks(self, n: int, jobs: int, history: History) -> Tasks:
        return ((MiniTask(len(history), 0),) if len(history) < jobs else (),) * n


class Uncoded(OneRoundScheme):
    """Worker i computes chunk i; a job needs all of them."""

    def load(self, n: int) -> float:
        """Return 1 / n."""
        return 1 / n

    def parts(self, n: int, worker: int, task: MiniTask) -> tuple[tuple[int, float], ...]:
        return ((worker, 1.0),)

    def decodable(self, n: int, history: History, job: int) -> bool:
        return job < len(history) and not history[job]

    def decode(self, n: int, history: History, job: int) -> tuple[CodedVector, ...] | None:
        return tuple(CodedVector(i, job, 0, 1.0) for i in range(n)) if self.decodable(n, history, job) else None

    def conforms(self, n: int, history: History) -> bool:
        """Return whether no worker is late."""
        return not history[-1]
