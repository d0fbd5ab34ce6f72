"""Who held which stage when."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.observe.run.naming import Naming
from planaria.record.decisions import Disband, Finish, Form
from planaria.record.events import RunStarted, WorkerLost
from planaria.record.logs import RunRecord


@dataclass(frozen=True)
class Holding:
    """A worker stood at a node from ``start`` to ``end`` (monotonic seconds)."""

    node: int
    where: str
    """the node by name"""
    worker: str
    start: float
    end: float


def holdings(record: RunRecord) -> list[Holding]:
    """All holdings by node and time. A node where nobody stands has a gap; open ends close at the last thing known."""
    done: list[Holding] = []
    held: dict[int, tuple[str, float]] = {}
    naming = Naming()

    def close(node: int, t: float) -> None:
        worker, start = held.pop(node)
        done.append(Holding(node, naming.row(node), worker, start, t))

    last = 0.0
    for t, fact in record.landmarks:
        if isinstance(fact, RunStarted):  # an earlier part of the run ended with whatever it said last
            for node in list(held):
                close(node, last)
            naming = Naming(fact)
        elif isinstance(fact, WorkerLost | Finish):
            gone = [n for n, (worker, _) in held.items() if isinstance(fact, Finish) or worker == fact.worker]
            for node in gone:
                close(node, t)
        elif isinstance(fact, Form | Disband):
            members = {m.node: m.worker for m in fact.members} if isinstance(fact, Form) else {}
            own = {node: worker for node, (worker, _) in held.items() if naming.replica(node) == fact.replica}
            for node in [node for node, worker in own.items() if members.get(node) != worker]:
                close(node, t)
            for node, worker in members.items():
                held.setdefault(node, (worker, t))
        last = t
    for node in list(held):
        close(node, last)
    return sorted(done, key=lambda h: (h.node, h.start))
