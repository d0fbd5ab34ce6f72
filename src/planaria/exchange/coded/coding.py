"""A scheme applied to the replicas and jobs of one training step.

A step's microbatches are split into ``jobs`` gradients of equal weight, so that jobs do not wait for each other; a step
takes ``jobs`` + T rounds, of which the last T finish open jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from planaria.config.schema import ExchangeConfig
from planaria.exchange.coded.base import History, Late, MiniTask, Scheme
from planaria.exchange.coded.schemes import CodedSchedule, make_coded_schedule

CountedReplicas = tuple[frozenset[int], ...]
"""replicas whose results count, for each completed round"""


class SentVector(NamedTuple):
    """A vector that a replica sent in a round of a step."""

    replica: int
    round: int
    job: int
    vector: int


class AssignedTask(NamedTuple):
    """One mini-task of a replica."""

    task: MiniTask
    chunks: tuple[tuple[int, float], ...]
    """chunks of the step, numbered through all its jobs, in order, each with its weight"""


@dataclass(frozen=True)
class Coding:
    """The tasks of each round, which follow from the counted replicas of earlier rounds alone."""

    coded: CodedSchedule
    replicas: int

    @property
    def scheme(self) -> Scheme:
        """The coding scheme."""
        return self.coded.scheme

    @property
    def jobs(self) -> int:
        """Jobs in a step."""
        return self.coded.jobs

    @property
    def slow(self) -> float:
        """Multiple of a round's fastest time after which the other replicas are late."""
        return self.coded.slow

    @property
    def rounds(self) -> int:
        """Rounds in a step."""
        return self.jobs + self.scheme.delay()

    @property
    def chunks(self) -> int:
        """Chunks in a step: equal parts of its microbatches."""
        return self.jobs * self.scheme.chunks(self.replicas)

    def uncounted_replicas(self, counted: frozenset[int]) -> Late:
        """Return the replicas whose work of a round is lost if only ``counted`` ones count."""
        return frozenset(range(self.replicas)) - counted

    def history(self, counted: CountedReplicas) -> History:
        """Return the history in the schemes' form."""
        return [self.uncounted_replicas(replicas) for replicas in counted]

    def tasks_of(self, counted: CountedReplicas, replica: int) -> list[AssignedTask]:
        """Return the mini-tasks of ``replica`` in the next round."""
        size = self.scheme.chunks(self.replicas)
        tasks = self.scheme.tasks(self.replicas, self.jobs, self.history(counted))[replica]
        parts = [(task, self.scheme.parts(self.replicas, replica, task)) for task in tasks]
        return [AssignedTask(t, tuple((t.job * size + chunk, weight) for chunk, weight in pairs)) for t, pairs in parts]

    def busy(self, counted: CountedReplicas) -> frozenset[int]:
        """Return the replicas with mini-tasks in the next round."""
        tasks_of = self.scheme.busy(self.replicas, self.jobs, self.history(counted))
        return frozenset(replica for replica, tasks in enumerate(tasks_of) if tasks)

    def may_close(self, counted: CountedReplicas, done: frozenset[int], late: bool) -> bool:
        """Return whether the next round may end with the results of the replicas in ``done``.

        If the scheme lets later rounds repeat missing work, the round ends early only once it is ``late``.
        """
        missing = self.uncounted_replicas(done)
        if not missing:
            return True
        if self.scheme.delay() and not late:
            return False
        return self.scheme.tolerates_losses(self.replicas, self.jobs, [*self.history(counted), missing])

    def decoding_terms(self, counted: CountedReplicas) -> list[tuple[SentVector, float]]:
        """Return the vectors and coefficients that add up to the step's gradient, in order of addition."""
        vectors, history = list[tuple[SentVector, float]](), self.history(counted)
        for job in range(self.jobs):
            shares = self.scheme.decode(self.replicas, history[: job + self.scheme.delay() + 1], job)
            assert shares is not None, f"job {job} cannot be decoded from {counted}"
            vectors += [(SentVector(s.worker, s.round, job, s.vector), s.coefficient) for s in shares]
        return vectors


@lru_cache
def make_coding(config: ExchangeConfig) -> Coding | None:
    """Return the coding that ``exchange.coded`` configures, or None.

    :raises UserError: for an unknown name or incompatible settings.
    """
    return Coding(make_coded_schedule(config.coded, config.replicas), config.replicas) if config.coded else None
