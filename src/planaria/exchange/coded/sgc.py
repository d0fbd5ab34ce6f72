"""SR-SGC and M-SGC, sequential gradient coding for bursts of late workers (arXiv 2211.13802).

SR-SGC (section 3.1) is plain gradient coding whose late tasks are repeated some rounds later.

M-SGC (section 3.2): most chunks are uncoded and retried when late; few are coded against workers that stay away. A job
has data D1 and D2. Of D1 each worker owns W − 1 chunks, uncoded. D2 is B groups of n chunks, each group coded with
GC(n, λ). In units of a D2 chunk a D1 chunk has λ + 1, so that all mini-tasks have λ + 1. With λ = n there is no D2, and
a D1 chunk is one unit.

Section 2 defines the patterns of late workers that both tolerate as published.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from pydantic import Field

from planaria.config import bounds
from planaria.exchange.coded.base import NOBODY, CodedVector, History, Late, MiniTask, Scheme, Stragglers, Tasks
from planaria.exchange.coded.gc import code, precision_problem

Window = Annotated[int, Field(ge=2), bounds.at_most(64, "a job stays open for as many rounds")]
Burst = Annotated[int, Field(ge=1), bounds.at_most(63, "it is shorter than a window")]


class WindowedScheme(Scheme):
    """A scheme for bursts: a bounded number of late workers within a window of rounds, each late for a bounded time."""

    burst: Burst = 1
    """B: a worker's late rounds within a window span fewer rounds than this"""
    window: Window = 2
    """W, in rounds"""
    stragglers: Stragglers = 1
    """λ: distinct workers that are late within a window"""

    def why_unsupported(self, n: int) -> str:
        if self.burst >= self.window:
            return f"burst = {self.burst} is not below window = {self.window}; use window = {self.burst + 1} or more"
        if self.stragglers > n:
            return f"stragglers = {self.stragglers} is more than all {n} replicas; use {n} or fewer"
        return ""


def is_bursty(window: History, burst: int, max_late: int) -> bool:
    """Return whether one window is (B, W, λ)-bursty: at most λ distinct late workers, each within B rounds."""
    first: dict[int, int] = {}
    for round, late in enumerate(window):
        for worker in late:
            if round - first.setdefault(worker, round) >= burst:
                return False
    return len(first) <= max_late


def is_arbitrary(window: History, times: int, max_late: int) -> bool:
    """Return whether one window is (N, W′, λ′)-arbitrary: at most λ′ late workers, each at most N times."""
    counts = Counter(worker for late in window for worker in late)
    return len(counts) <= max_late and max(counts.values(), default=0) <= times


def bursty_throughout(history: History, burst: int, width: int, max_late: int) -> bool:
    """Return whether every window of ``width`` rounds is bursty; a shorter history is one window."""
    starts = range(max(1, len(history) - width + 1))
    return all(is_bursty(history[start : start + width], burst, max_late) for start in starts)


class SRSGC(WindowedScheme):
    """GC(n, s) with the s that bursts need if excess late tasks are repeated: T = B, which divides W − 1."""

    def why_unsupported(self, n: int) -> str:
        if why := super().why_unsupported(n):
            return why
        if (self.window - 1) % self.burst:
            divisible = self.window + self.burst - (self.window - 1) % self.burst
            return (
                f"burst = {self.burst} does not divide window − 1 = {self.window - 1}; use window = {divisible}, "
                "or burst = 1"
            )
        return precision_problem(n, self.stragglers, self._spare)

    def spare(self) -> int:
        """Return s = ⌈Bλ / (W − 1 + B)⌉."""
        return self._spare(self.stragglers)

    def _spare(self, stragglers: int) -> int:
        return -(-self.burst * stragglers // (self.window - 1 + self.burst))

    def delay(self) -> int:
        return self.burst

    def load(self, n: int) -> float:
        """Return (s + 1) / n."""
        return (self.spare() + 1) / n

    def tasks(self, n: int, jobs: int, history: History) -> Tasks:
        now = len(history)
        again = self._repeating(history, now)
        new = (MiniTask(now, 0),) if now < jobs else ()
        return tuple((MiniTask(now - self.burst, 0),) if worker in again else new for worker in range(n))

    def parts(self, n: int, worker: int, task: MiniTask) -> tuple[tuple[int, float], ...]:
        return code(n, self.spare()).row(worker)

    def missing(self, history: History, round: int) -> Late:
        """Return the workers without a result for the job of this round: late, or repeating an earlier one."""
        missing = NOBODY
        for late in history[round % self.burst : round + 1 : self.burst]:
            missing = late | self._first(missing)
        return missing

    def _first(self, missing: Late) -> Late:
        """Return the workers that repeat if these are missing: the first, as many as exceed s."""
        return frozenset(sorted(missing)[: max(0, len(missing) - self.spare())])

    def _repeating(self, history: History, now: int) -> Late:
        """Return the workers that repeat in round ``now`` the task of B rounds before."""
        return self._first(self.missing(history, now - self.burst)) if now >= self.burst else NOBODY

    def _sent(self, n: int, history: History, job: int) -> dict[int, int]:
        """Return worker → round in which it sent a result for the job in time."""
        missing, again = self.missing(history, job), job + self.burst
        sent = {worker: job for worker in range(n) if worker not in missing}
        if again < len(history):
            sent |= dict.fromkeys(self._first(missing) - history[again], again)
        return sent

    def decodable(self, n: int, history: History, job: int) -> bool:
        return job < len(history) and code(n, self.spare()).determines_sum(self._sent(n, history, job))

    def decode(self, n: int, history: History, job: int) -> tuple[CodedVector, ...] | None:
        sent = self._sent(n, history, job) if job < len(history) else {}
        shares = code(n, self.spare()).coefficients(sent)
        return None if shares is None else tuple(CodedVector(i, sent[i], 0, part) for i, part in shares.items())

    def conforms(self, n: int, history: History) -> bool:
        """Return whether the newest window is bursty, ignoring rounds with at most s late workers and no repetition."""
        window = []
        for now in range(max(0, len(history) - self.window), len(history)):
            counts = len(history[now]) > self.spare() or self._repeating(history, now)
            window.append(history[now] if counts else NOBODY)
        return is_bursty(window, self.burst, self.stragglers)


class MSGC(WindowedScheme):
    """Round r's mini-task m belongs to job r − m, for m in 0 … W − 2 + B: T = W − 2 + B."""

    def why_unsupported(self, n: int) -> str:
        return super().why_unsupported(n) or (precision_problem(n, self.stragglers) if self.stragglers < n else "")

    def delay(self) -> int:
        return self.window - 2 + self.burst

    def slots(self) -> int:
        return self.window - 1 + self.burst

    def vectors(self) -> int:
        """1 + B: a worker sends the sum of its uncoded gradients once, instead of W − 1 + B vectors as published."""
        return 1 + self.burst

    def load(self, n: int) -> float:
        """Return (λ+1)(W−1+B) / (n (B + (W−1)(λ+1))); (W−1+B) / (n (W−1)) if λ = n."""
        if self.stragglers == n:
            return self.slots() / (n * (self.window - 1))
        return (self.stragglers + 1) * self.slots() / self.chunks(n)

    def chunks(self, n: int) -> int:
        if self.stragglers == n:
            return n * (self.window - 1)
        return n * ((self.window - 1) * (self.stragglers + 1) + self.burst)

    def pending_pieces(self, history: History, worker: int, job: int) -> list[int]:
        """Return the worker's D1 chunks of the job that it was late with and has not repeated by the end of
        ``history``."""
        firsts = history[job : job + self.window - 1]
        pending_pieces = [piece for piece, late in enumerate(firsts) if worker in late]
        for late in history[job + self.window - 1 : job + self.slots()]:
            if pending_pieces and worker not in late:
                pending_pieces.pop(0)
        return pending_pieces

    def _task(self, n: int, history: History, worker: int, job: int) -> MiniTask | None:
        step, pending_pieces = len(history) - job, self.pending_pieces(history, worker, job)
        if step < self.window - 1:
            return MiniTask(job, step, 0, sent=step == self.window - 2 and not pending_pieces)
        if pending_pieces:
            return MiniTask(job, pending_pieces[0], 0, sent=len(pending_pieces) == 1)
        group = step - (self.window - 1)
        return MiniTask(job, self.window - 1 + group, 1 + group) if self.stragglers < n else None

    def tasks(self, n: int, jobs: int, history: History) -> Tasks:
        now = len(history)
        under_way = range(min(now, jobs - 1), max(-1, now - self.slots()), -1)
        tasks_of = ([self._task(n, history, worker, job) for job in under_way] for worker in range(n))
        return tuple(tuple(task for task in tasks if task) for tasks in tasks_of)

    def busy(self, n: int, jobs: int, history: History) -> list[int]:
        if self.stragglers == n:
            return super().busy(n, jobs, history)
        now = len(history)
        return [len(range(max(0, now - self.slots() + 1), min(now + 1, jobs)))] * n

    def parts(self, n: int, worker: int, task: MiniTask) -> tuple[tuple[int, float], ...]:
        uncoded, size = self.window - 1, 1 if self.stragglers == n else self.stragglers + 1
        if task.piece < uncoded:
            first = (worker * uncoded + task.piece) * size
            return tuple((first + step, 1.0) for step in range(size))
        first = n * (uncoded * size + task.piece - uncoded)
        return tuple((first + chunk, weight) for chunk, weight in code(n, self.stragglers).row(worker))

    def _caught_up_at(self, history: History, worker: int, job: int) -> int | None:
        """Return the round in which the worker sent its uncoded sum in time."""
        for now in range(job + self.window - 2, min(len(history), job + self.slots())):
            if worker not in history[now] and not self.pending_pieces(history[: now + 1], worker, job):
                return now
        return None

    def _coded(self, n: int, history: History, job: int, group: int) -> list[int]:
        """Return the workers that sent a coded result of the group in time."""
        now = job + self.window - 1 + group
        if now >= len(history):
            return []
        in_time = (worker for worker in range(n) if worker not in history[now])
        return [worker for worker in in_time if not self.pending_pieces(history[:now], worker, job)]

    def _groups(self, n: int) -> range:
        return range(self.burst if self.stragglers < n else 0)

    def decodable(self, n: int, history: History, job: int) -> bool:
        if any(self._caught_up_at(history, worker, job) is None for worker in range(n)):
            return False
        coded = (self._coded(n, history, job, group) for group in self._groups(n))
        return all(code(n, self.stragglers).determines_sum(workers) for workers in coded)

    def decode(self, n: int, history: History, job: int) -> tuple[CodedVector, ...] | None:
        shares = []
        for worker in range(n):
            if (caught_up := self._caught_up_at(history, worker, job)) is None:
                return None
            shares.append(CodedVector(worker, caught_up, 0, 1.0))
        for group in self._groups(n):
            now = job + self.window - 1 + group
            if (coefficients := code(n, self.stragglers).coefficients(self._coded(n, history, job, group))) is None:
                return None
            shares += [CodedVector(worker, now, 1 + group, part) for worker, part in coefficients.items()]
        return tuple(shares)

    def conforms(self, n: int, history: History) -> bool:
        """Return whether the newest T + 1 rounds (one job's) are (B, W, λ)-bursty or (B, W + B − 1, λ)-arbitrary."""
        newest = history[-self.slots() :]
        return bursty_throughout(newest, self.burst, self.window, self.stragglers) or is_arbitrary(
            newest, self.burst, self.stragglers
        )

    def tolerates_losses(self, n: int, jobs: int, history: History) -> bool:
        """As :meth:`Scheme.tolerates_losses`; tests :meth:`conforms` first, which is faster and implies it."""
        return self.conforms(n, history) or super().tolerates_losses(n, jobs, history)
