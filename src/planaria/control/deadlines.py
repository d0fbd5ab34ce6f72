"""When a worker that beats is stuck all the same: its main thread has been at one thing for too long. Pure.

A heartbeat tells where the main thread is and since when. What counts as too long is scaled by what the same thing has
taken in this run, never less than the recipe's number; a thread that computes is given ten times as long as one that
does nothing, because a busy machine makes everything slow and nothing idle.
"""

from __future__ import annotations

from collections.abc import Collection

from planaria.config.schema import RunConfig
from planaria.record.events import Heartbeat, Worked

DISK = ("read", "write")
_SPANS = {"optimizer": "commit", "save": "write", "rebuild": "rebuild"}
"""what a span is called where a place is called otherwise"""
_TIMES = 10
"""how many times as long as its longest an action may take"""
_IDLE = 0.02
"""a main thread that has used less of a processor than this share of the time is not computing"""
_FADES = 0.995
"""what is remembered of the longest, from one span of its kind to the next: a run may become faster"""
_COMPILING_S = 600.0
"""for a stage's first passes where they are compiled"""


class Deadlines:
    """The deadlines of one run's workers."""

    def __init__(self, config: RunConfig) -> None:
        self._fleet, self._compiles = config.fleet, config.train.compile
        self._longest: dict[str, float] = {}
        self._asked: dict[str, tuple[float, frozenset[str]]] = {}
        """worker → when it was given its last order, and those that were given it too"""
        self._writers: dict[str, frozenset[str]] = {}
        """worker → those that were told with it to write while training goes on, the last time"""

    def ask(self, t: float, workers: Collection[str], to_write: bool = False) -> None:
        """These workers have been given an order that they are to answer; to write beside, what may take longer."""
        together = frozenset(workers)
        self._asked |= dict.fromkeys(workers, (t, together))
        if to_write:
            self._writers |= dict.fromkeys(workers, together)

    def learn(self, worked: Worked) -> None:
        """What a worker's actions have taken, in seconds."""
        for span in worked.spans:
            name = _SPANS.get(span.action, span.action)
            self._longest[name] = max(span.end - span.start, _FADES * self._longest.get(name, 0.0))

    def limit_s(self, doing: str) -> float:
        """How long a main thread may be ``doing`` this without using a processor."""
        floor = self._fleet.disk_timeout_s if doing in DISK else self._fleet.timeout_s
        if self._compiles and doing in ("forward", "backward") and doing not in self._longest:
            floor = max(floor, _COMPILING_S)
        return max(floor, _TIMES * self._longest.get(doing, 0.0))

    def unwritten(self, worker: str, beat: Heartbeat, writing: Collection[str]) -> str:
        """Why ``worker``, which writes for a checkpoint while it trains, counts as dead, or nothing; ``writing`` are
        all that do. A disk that answers nobody is waited for, as :meth:`overdue` does."""
        together = self._writers.get(worker, frozenset())
        limit = self.limit_s("write") * (_TIMES if together and together <= set(writing) else 1)
        if beat.writing < 0 or worker not in writing or beat.writing_s <= limit:
            return ""
        return (
            f"its file of checkpoint {beat.writing} has not been written for {beat.writing_s:.1f} s (limit {limit:g} s)"
        )

    def overdue(self, t: float, worker: str, beat: Heartbeat, awaited: Collection[str]) -> str:
        """Why ``worker`` counts as dead, or nothing; ``awaited`` are the workers of its replica that owe an answer."""
        asked_at, together = self._asked.get(worker, (t, frozenset()))
        took, limit = beat.for_s, self._fleet.timeout_s
        if beat.waiting:  # for others, who may be stuck; or for orders, although it has one
            took = min(took, t - asked_at) if beat.doing == "orders" and worker in awaited else 0.0
        else:
            # A disk that answers nobody is waited for: to count all that wait as dead would lose what only they have.
            together_stuck = beat.doing in DISK and together <= set(awaited)
            patient = together_stuck or beat.cpu_s > _IDLE * beat.for_s
            limit = self.limit_s(beat.doing) * (_TIMES if patient else 1)
        if took <= limit:
            return ""
        where = beat.doing if beat.microbatch < 0 else f"{beat.doing} of microbatch {beat.microbatch}"
        return f"its main thread has been in {where}, step {beat.step}, for {took:.1f} s (limit {limit:g} s)"
