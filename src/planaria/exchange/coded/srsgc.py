"""SR-SGC: plain gradient coding whose late tasks are repeated some rounds later (arXiv 2211.13802, section 3.1)."""

from __future__ import annotations

from planaria.exchange.coded.base import NOBODY, History, Late, Share, Task, Tasks, Windowed
from planaria.exchange.coded.gc import code, rough
from planaria.exchange.coded.patterns import bursty


class SRSGC(Windowed):
    """GC(n, s) with the s that bursts need if what is too much is repeated: T = B, which divides W − 1."""

    def objection(self, n: int) -> str:
        if why := super().objection(n):
            return why
        if (self.window - 1) % self.burst:
            fitting = self.window + self.burst - (self.window - 1) % self.burst
            return (
                f"burst = {self.burst} does not divide window − 1 = {self.window - 1}; give window = {fitting}, "
                "or burst = 1"
            )
        return rough(n, self.stragglers, self._spare)

    def spare(self) -> int:
        """s = ⌈Bλ / (W − 1 + B)⌉."""
        return self._spare(self.stragglers)

    def _spare(self, stragglers: int) -> int:
        return -(-self.burst * stragglers // (self.window - 1 + self.burst))

    def delay(self) -> int:
        return self.burst

    def load(self, n: int) -> float:
        """(s + 1) / n."""
        return (self.spare() + 1) / n

    def tasks(self, n: int, jobs: int, history: History) -> Tasks:
        now = len(history)
        again = self._repeating(history, now)
        new = (Task(now, 0),) if now < jobs else ()
        return tuple((Task(now - self.burst, 0),) if worker in again else new for worker in range(n))

    def parts(self, n: int, worker: int, task: Task) -> tuple[tuple[int, float], ...]:
        return code(n, self.spare()).row(worker)

    def missing(self, history: History, round: int) -> Late:
        """Those whose result for the job that began in the round is missing: late, or repeating an earlier one."""
        found = NOBODY
        for late in history[round % self.burst : round + 1 : self.burst]:
            found = late | self._first(found)
        return found

    def _first(self, missing: Late) -> Late:
        """Who repeats when these are missing: the first of them, as many as exceed s."""
        return frozenset(sorted(missing)[: max(0, len(missing) - self.spare())])

    def _repeating(self, history: History, now: int) -> Late:
        """Who repeats in round ``now`` the task of B rounds before."""
        return self._first(self.missing(history, now - self.burst)) if now >= self.burst else NOBODY

    def _sent(self, n: int, history: History, job: int) -> dict[int, int]:
        """Who sent a result for the job in time, and in which round."""
        missing, again = self.missing(history, job), job + self.burst
        sent = {worker: job for worker in range(n) if worker not in missing}
        if again < len(history):
            sent |= dict.fromkeys(self._first(missing) - history[again], again)
        return sent

    def decodable(self, n: int, history: History, job: int) -> bool:
        return job < len(history) and code(n, self.spare()).bears(self._sent(n, history, job))

    def decode(self, n: int, history: History, job: int) -> tuple[Share, ...] | None:
        sent = self._sent(n, history, job) if job < len(history) else {}
        found = code(n, self.spare()).coefficients(sent)
        return None if found is None else tuple(Share(i, sent[i], 0, part) for i, part in found.items())

    def conforms(self, n: int, history: History) -> bool:
        """Bursty in the newest window, where a round with at most s late in which nobody repeats does not count."""
        window = []
        for now in range(max(0, len(history) - self.window), len(history)):
            counts = len(history[now]) > self.spare() or self._repeating(history, now)
            window.append(history[now] if counts else NOBODY)
        return bursty(window, self.burst, self.stragglers)
