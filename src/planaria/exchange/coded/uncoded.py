"""Without a code: all are waited for; or, as a rival in simulations alone, the slowest are dropped."""

from __future__ import annotations

from typing import ClassVar

from planaria.exchange.coded.base import History, Scheme, Share, Stragglers, Task, Tasks


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
