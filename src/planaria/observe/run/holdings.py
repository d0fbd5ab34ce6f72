"""Who held which stage when."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.observe.run.naming import Naming
from planaria.record.decisions import Finish
from planaria.record.events import RunStarted
from planaria.record.logs import RunRecord
from planaria.record.membership import Membership


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
    members, naming, last = Membership(), Naming(), 0.0

    def close(node: int, t: float) -> None:
        worker, start = held.pop(node)
        done.append(Holding(node, naming.row(node), worker, start, t))

    for t, fact in record.landmarks:
        changed, over = members.take(fact), isinstance(fact, Finish)
        for node in list(held) if over else changed:
            if node in held:  # an earlier part of the run ended with whatever it said last
                close(node, last if isinstance(fact, RunStarted) else t)
            if node in members.holders and not over:
                held[node] = members.holders[node], t
        naming, last = Naming(fact) if isinstance(fact, RunStarted) else naming, t
    for node in list(held):
        close(node, last)
    return sorted(done, key=lambda h: (h.node, h.start))
