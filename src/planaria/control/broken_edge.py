"""What happens when an edge between two workers breaks, in order.

1. Both ends notice it on their sockets (``runtime/transport/edge.py``) and report it (``runtime/engine/post.py``):
   ``EdgeBroken``.
2. Mostly one of them is dead. So the fleet has some time (:data:`GRACE_S`) to tell of that: ``WorkerLost``.
3. If it does not, the edge itself is to blame: ``GraceExpired``.
4. Either is folded into the run's state (``record/losses.py``).
5. A new generation is decided (``control/formation.py``): ``Form``.
6. The workers connect anew (``runtime/engine/links.py``), and the step begins again.
"""

from __future__ import annotations

from planaria.record.events import EdgeBroken, GraceExpired
from planaria.record.state import RunState

GRACE_S = 0.5
"""after a broken edge, how long a death notice for one of its ends may take before the edge itself is blamed"""


class BrokenEdges:
    """Edges that are not blamed yet. It keeps no clock: times are given, in seconds."""

    def __init__(self) -> None:
        self._until: dict[int, tuple[float, int]] = {}
        """replica → when an edge is to be blamed, and of which generation"""

    def heard(self, t: float, broken: EdgeBroken, run: RunState) -> None:
        """An edge broke at ``t``; ``run`` knows of it."""
        replica = run.replica_of(broken.worker)
        if replica is not None and replica.suspects:
            _, generation = self._until.get(replica.number, (0.0, -1))
            if generation != replica.generation:
                self._until[replica.number] = (t + GRACE_S, replica.generation)

    @property
    def due(self) -> list[float]:
        """When :meth:`blamed` is to be asked."""
        return [until for until, _ in self._until.values()]

    def blamed(self, now: float, run: RunState) -> list[GraceExpired]:
        """The replicas whose time is over, each told of once; not if they have a new generation since."""
        over = [(number, generation) for number, (until, generation) in self._until.items() if now >= until]
        for number, _ in over:
            del self._until[number]
        return [GraceExpired(replica=n, generation=g) for n, g in over if g == run.replicas[n].generation]
