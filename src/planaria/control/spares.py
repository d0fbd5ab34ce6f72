"""Which spare takes over which node. Pure."""

from __future__ import annotations

from planaria.record.replica import ReplicaState
from planaria.record.state import RunState


def filled(run: RunState, replica: ReplicaState) -> dict[int, str]:
    """Spares for vacant nodes; where there are too few, who was to leave one stands there again."""
    vacant = sorted(replica.vacant, key=lambda node: node in replica.leavers)
    again = {node: worker for node, worker in replica.leavers.items() if node in vacant}
    return {**replica.holders, **again, **dict(zip(vacant, at_hand(run, replica), strict=False))}


def at_hand(run: RunState, replica: ReplicaState) -> list[str]:
    """Spares for a replica: those of the run's own machines first, or last if it is there because machines joined."""
    later = replica.number >= run.settings.replicas
    return sorted(run.spares, key=lambda worker: bool(run.workers[worker].host) != later)
