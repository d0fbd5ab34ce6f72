"""Who has an edge to whom in a run whose nodes are all there; faults of edges that there are not."""

from __future__ import annotations

from collections.abc import Iterable

from planaria.common.errors import UserError
from planaria.control.replica import ReplicaState
from planaria.faults.trace import Fault
from planaria.runtime.engine.origin import START, run_started
from planaria.runtime.engine.resolved import ResolvedRun


def neighbours(resolved: ResolvedRun, node: int) -> set[int]:
    """The nodes at the other ends of a node's edges."""
    started = run_started(resolved, START)
    states = (ReplicaState.start(started, number) for number in range(started.most_replicas))
    pairs = {pair for state in states for pair in state.pairs_of(state.arrangement.stage)}
    return {other for pair in pairs if node in pair for other in pair} - {node}


def require_edges(resolved: ResolvedRun, faults: Iterable[Fault], where: str) -> None:
    """:raises UserError: when one of the faults, from ``where``, is of an edge that this run does not have."""
    for fault in faults:
        if fault.peer is None:
            continue
        known = neighbours(resolved, fault.stage)
        if fault.peer not in known:
            there = ", ".join(map(str, sorted(known))) or "none"
            raise UserError(
                f"{where}: a fault '{fault.signal}' of the edge {fault.peer} → {fault.stage}, which there is not; "
                f"{fault.stage} has edges to: {there}"
            )
