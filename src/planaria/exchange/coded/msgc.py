"""M-SGC: most chunks uncoded and retried when late, few coded against what stays away (arXiv 2211.13802, section 3.2).

A job's data are D1 and D2. Of D1 each worker owns W − 1 chunks, uncoded. D2 is B groups of n chunks, each group coded
with GC(n, λ). In units of a D2 chunk a D1 chunk has λ + 1, so that all mini-tasks have λ + 1. With λ = n there is no
D2, and a D1 chunk is one unit.
"""

from __future__ import annotations

from planaria.exchange.coded.base import History, Share, Task, Tasks, Windowed
from planaria.exchange.coded.gc import code, rough
from planaria.exchange.coded.patterns import arbitrary, bursty_throughout


class MSGC(Windowed):
    """Round r's mini-task m belongs to job r − m, for m in 0 … W − 2 + B: T = W − 2 + B."""

    def objection(self, n: int) -> str:
        return super().objection(n) or (rough(n, self.stragglers) if self.stragglers < n else "")

    def delay(self) -> int:
        return self.window - 2 + self.burst

    def slots(self) -> int:
        return self.window - 1 + self.burst

    def vectors(self) -> int:
        """1 + B: a worker sums its uncoded gradients and sends them once, where the published form sends W − 1 + B."""
        return 1 + self.burst

    def load(self, n: int) -> float:
        """(λ+1)(W−1+B) / (n (B + (W−1)(λ+1))); (W−1+B) / (n (W−1)) where λ = n."""
        if self.stragglers == n:
            return self.slots() / (n * (self.window - 1))
        return (self.stragglers + 1) * self.slots() / self.chunks(n)

    def chunks(self, n: int) -> int:
        if self.stragglers == n:
            return n * (self.window - 1)
        return n * ((self.window - 1) * (self.stragglers + 1) + self.burst)

    def owed(self, history: History, worker: int, job: int) -> list[int]:
        """The worker's D1 chunks of the job that it was late with and has not made up for by the end of ``history``."""
        firsts = history[job : job + self.window - 1]
        owed = [piece for piece, late in enumerate(firsts) if worker in late]
        for late in history[job + self.window - 1 : job + self.slots()]:
            if owed and worker not in late:
                owed.pop(0)
        return owed

    def _task(self, n: int, history: History, worker: int, job: int) -> Task | None:
        step, owed = len(history) - job, self.owed(history, worker, job)
        if step < self.window - 1:
            return Task(job, step, 0, sent=step == self.window - 2 and not owed)
        if owed:
            return Task(job, owed[0], 0, sent=len(owed) == 1)
        group = step - (self.window - 1)
        return Task(job, self.window - 1 + group, 1 + group) if self.stragglers < n else None

    def tasks(self, n: int, jobs: int, history: History) -> Tasks:
        now = len(history)
        under_way = range(min(now, jobs - 1), max(-1, now - self.slots()), -1)
        found = ([self._task(n, history, worker, job) for job in under_way] for worker in range(n))
        return tuple(tuple(task for task in own if task) for own in found)

    def busy(self, n: int, jobs: int, history: History) -> list[int]:
        if self.stragglers == n:
            return super().busy(n, jobs, history)
        now = len(history)
        return [len(range(max(0, now - self.slots() + 1), min(now + 1, jobs)))] * n

    def parts(self, n: int, worker: int, task: Task) -> tuple[tuple[int, float], ...]:
        own, size = self.window - 1, 1 if self.stragglers == n else self.stragglers + 1
        if task.piece < own:
            first = (worker * own + task.piece) * size
            return tuple((first + step, 1.0) for step in range(size))
        first = n * (own * size + task.piece - own)
        return tuple((first + chunk, weight) for chunk, weight in code(n, self.stragglers).row(worker))

    def _paid(self, history: History, worker: int, job: int) -> int | None:
        """The round in which the worker sent its uncoded sum in time."""
        for now in range(job + self.window - 2, min(len(history), job + self.slots())):
            if worker not in history[now] and not self.owed(history[: now + 1], worker, job):
                return now
        return None

    def _coded(self, n: int, history: History, job: int, group: int) -> list[int]:
        """Who sent a coded result of the group in time."""
        now = job + self.window - 1 + group
        if now >= len(history):
            return []
        there = (worker for worker in range(n) if worker not in history[now])
        return [worker for worker in there if not self.owed(history[:now], worker, job)]

    def _groups(self, n: int) -> range:
        return range(self.burst if self.stragglers < n else 0)

    def decodable(self, n: int, history: History, job: int) -> bool:
        if any(self._paid(history, worker, job) is None for worker in range(n)):
            return False
        coded = (self._coded(n, history, job, group) for group in self._groups(n))
        return all(code(n, self.stragglers).bears(there) for there in coded)

    def decode(self, n: int, history: History, job: int) -> tuple[Share, ...] | None:
        shares = []
        for worker in range(n):
            if (paid := self._paid(history, worker, job)) is None:
                return None
            shares.append(Share(worker, paid, 0, 1.0))
        for group in self._groups(n):
            now = job + self.window - 1 + group
            if (found := code(n, self.stragglers).coefficients(self._coded(n, history, job, group))) is None:
                return None
            shares += [Share(worker, now, 1 + group, part) for worker, part in found.items()]
        return tuple(shares)

    def conforms(self, n: int, history: History) -> bool:
        """The newest T + 1 rounds are (B, W, λ)-bursty or (B, W + B − 1, λ)-arbitrary: one job's rounds, either way."""
        newest = history[-self.slots() :]
        return bursty_throughout(newest, self.burst, self.window, self.stragglers) or arbitrary(
            newest, self.burst, self.stragglers
        )

    def bears(self, n: int, jobs: int, history: History) -> bool:
        """As :meth:`Scheme.bears`; what conforms does, and is told sooner: its rounds are all that open jobs have."""
        return self.conforms(n, history) or super().bears(n, jobs, history)
