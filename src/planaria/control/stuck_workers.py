"""Deadlines of workers' actions: when a worker that still sends heartbeats counts as dead.

Reads no clock: callers pass monotonic seconds. ``runtime/fleet/heartbeats.py`` judges silent workers.
"""

from __future__ import annotations

from collections.abc import Collection

from planaria.config.schema import RunConfig
from planaria.control.facts.events import Heartbeat, WorkReport

DISK = ("read", "write")
_SPANS = {"optimizer": "commit", "save": "write", "rebuild": "rebuild"}
"""names of spans that differ from those of actions"""
_DURATION_FACTOR = 10
"""multiple of its longest duration that an action may take"""
_IDLE_CPU_SHARE = 0.02
"""share of processor time below which a main thread is not computing"""
_DURATION_DECAY = 0.995
"""decay of the longest duration from one span of its kind to the next: a run may become faster"""
_COMPILING_S = 600.0
"""seconds allowed for a stage's first passes if they are compiled"""


class ActionDeadlines:
    """Deadlines of the actions of one run's workers."""

    def __init__(self, config: RunConfig) -> None:
        self._fleet, self._compiles = config.fleet, config.train.compile
        self._longest: dict[str, float] = {}
        self._ordered: dict[str, tuple[float, frozenset[str]]] = {}
        """worker → time of its last order, and the workers with the same order"""
        self._writers: dict[str, frozenset[str]] = {}
        """worker → workers ordered with it to write in the background, the last time"""

    def record_order(self, t: float, workers: Collection[str], to_write: bool = False) -> None:
        """Record an order that these workers must answer; background writes may take longer."""
        together = frozenset(workers)
        self._ordered |= dict.fromkeys(workers, (t, together))
        if to_write:
            self._writers |= dict.fromkeys(workers, together)

    def record_durations(self, worked: WorkReport) -> None:
        """Record the durations of a worker's actions, in seconds."""
        for span in worked.spans:
            name = _SPANS.get(span.action, span.action)
            self._longest[name] = max(span.end - span.start, _DURATION_DECAY * self._longest.get(name, 0.0))

    def limit_s(self, doing: str) -> float:
        """Return the seconds that a main thread may spend on this activity without using a processor."""
        floor = self._fleet.disk_timeout_s if doing in DISK else self._fleet.timeout_s
        if self._compiles and doing in ("forward", "backward") and doing not in self._longest:
            floor = max(floor, _COMPILING_S)
        return max(floor, _DURATION_FACTOR * self._longest.get(doing, 0.0))

    def overdue_write_reason(self, worker: str, beat: Heartbeat, writing: Collection[str]) -> str:
        """Return why ``worker``, which writes in the background, counts as dead, or an empty string if it does not.

        A disk that blocks all ``writing`` workers is tolerated, as in :meth:`overdue_action_reason`.
        """
        together = self._writers.get(worker, frozenset())
        limit = self.limit_s("write") * (_DURATION_FACTOR if together and together <= set(writing) else 1)
        if beat.checkpoint_being_written < 0 or worker not in writing or beat.writing_s <= limit:
            return ""
        return (
            f"its file of checkpoint {beat.checkpoint_being_written} has not been written for "
            f"{beat.writing_s:.1f} s (limit {limit:g} s)"
        )

    def overdue_action_reason(self, t: float, worker: str, beat: Heartbeat, awaited: Collection[str]) -> str:
        """Return why ``worker`` counts as dead, or an empty string if it does not.

        :param awaited: workers of its replica that have not answered their orders yet.
        """
        ordered_at, together = self._ordered.get(worker, (t, frozenset()))
        took, limit = beat.action_s, self._fleet.timeout_s
        if beat.waiting:  # it waits for others that may be stuck, or for orders
            took = min(took, t - ordered_at) if beat.doing == "orders" and worker in awaited else 0.0
        else:
            # A disk that blocks all of them is tolerated: declaring all dead would lose states that only they have.
            together_stuck = beat.doing in DISK and bool(together) and together <= set(awaited)
            patient = together_stuck or beat.cpu_s > _IDLE_CPU_SHARE * beat.action_s
            limit = self.limit_s(beat.doing) * (_DURATION_FACTOR if patient else 1)
        if took <= limit:
            return ""
        where = beat.doing if beat.microbatch < 0 else f"{beat.doing} of microbatch {beat.microbatch}"
        return f"its main thread has been in {where}, step {beat.step}, for {took:.1f} s (limit {limit:g} s)"
