"""Who held which stage when."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.decisions import Finish, Form
from planaria.events import RunStarted, WorkerLost
from planaria.observe.logs import RunRecord


@dataclass(frozen=True)
class Holding:
    """A worker held a stage from ``start`` to ``end`` (monotonic seconds)."""

    stage: int
    worker: str
    start: float
    end: float


def holdings(record: RunRecord) -> list[Holding]:
    """All holdings by stage and time. A stage that nobody holds has a gap; open ends close at the last thing known."""
    done: list[Holding] = []
    held: dict[int, tuple[str, float]] = {}

    def close(stage: int, t: float) -> None:
        worker, start = held.pop(stage)
        done.append(Holding(stage, worker, start, t))

    last = 0.0
    for t, fact in record.history:
        if isinstance(fact, RunStarted):  # an earlier part of the run ended with whatever it said last
            for stage in list(held):
                close(stage, last)
        elif isinstance(fact, WorkerLost | Finish):
            gone = [s for s, (worker, _) in held.items() if isinstance(fact, Finish) or worker == fact.worker]
            for stage in gone:
                close(stage, t)
        elif isinstance(fact, Form):
            members = {member.stage: member.worker for member in fact.members}
            for stage in [s for s, (worker, _) in held.items() if members.get(s) != worker]:
                close(stage, t)
            for stage, worker in members.items():
                held.setdefault(stage, (worker, t))
        last = t
    for stage in list(held):
        close(stage, last)
    return sorted(done, key=lambda h: (h.stage, h.start))
