"""Broken edges: the reported ones, and when the edge itself is blamed instead of one of its ends.

A broken edge is handled in this order:

1. Both ends notice it on their sockets (``runtime/transport/edge.py``) and report ``EdgeBroken``.
2. Usually one of them is dead. The fleet has :data:`GRACE_S` to report ``WorkerLost``.
3. If it does not, the edge itself failed: ``GraceExpired``.
4. Either event changes the run's state (``control/apply_membership.py``).
5. A new generation is decided (``control/formation.py``): ``Form``.
6. The workers connect again (``runtime/worker/worker_edges.py``), and the step is repeated.
"""

from __future__ import annotations

from planaria.control.facts.events import EdgeBroken, GraceExpired
from planaria.control.state.run import RunState

GRACE_S = 0.5
"""seconds after a broken edge for a death notice about one of its ends, before the edge itself is blamed"""


class BrokenEdges:
    """Broken edges that are not blamed yet. Callers pass times in seconds."""

    def __init__(self) -> None:
        self._until: dict[int, tuple[float, int]] = {}
        """replica → when an edge will be blamed, and its generation"""

    def record(self, t: float, broken: EdgeBroken, run: RunState) -> None:
        """Record that an edge broke at ``t``; ``run`` already includes it."""
        replica = run.replica_of(broken.worker)
        if replica is not None and replica.broken_edges:
            _, generation = self._until.get(replica.number, (0.0, -1))
            if generation != replica.generation:
                self._until[replica.number] = (t + GRACE_S, replica.generation)

    @property
    def due(self) -> list[float]:
        """Times at which to call :meth:`blamed`."""
        return [until for until, _ in self._until.values()]

    def blamed(self, now: float, run: RunState) -> list[GraceExpired]:
        """Return the replicas whose grace expired, each once; not if they have a new generation."""
        over = [(number, generation) for number, (until, generation) in self._until.items() if now >= until]
        for number, _ in over:
            del self._until[number]
        return [GraceExpired(replica=n, generation=g) for n, g in over if g == run.replicas[n].generation]
