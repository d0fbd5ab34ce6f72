"""Which spare takes over which node. Pure.

Where block stages are unlike, the largest goes to the fastest worker whose device has room for it. That is the best
there is: if a smaller stage had the faster of two workers, exchanging them would leave the slower pass no slower.
"""

from __future__ import annotations

from collections.abc import Iterable

from planaria.record.replica import ReplicaState
from planaria.record.state import RunState


def filled(run: RunState, replica: ReplicaState) -> dict[int, str]:
    """Spares for vacant nodes; where there are too few, who was to leave one stands there again."""
    vacant = sorted(replica.vacant, key=lambda node: node in replica.leavers)
    again = {node: worker for node, worker in replica.leavers.items() if node in vacant}
    return {**replica.holders, **again, **taken_over(run, replica, vacant)}


def taken_over(run: RunState, replica: ReplicaState, nodes: Iterable[int]) -> dict[int, str]:
    """Spares for these nodes, for the first ones where there are too few."""
    spares, stage_of, work = at_hand(run, replica), replica.arrangement.stage, run.settings.work
    if not work:
        return dict(zip(nodes, spares, strict=False))
    taken: dict[int, str] = {}
    spares.sort(key=lambda worker: run.workers[worker].layer_s)
    for node in sorted([*nodes][: len(spares)], key=lambda node: -work[stage_of[node]]):
        fit = next((worker for worker in spares if has_room(run, worker, stage_of[node])), None)
        if fit is not None:
            taken[node] = fit
            spares.remove(fit)
    return taken


def has_room(run: RunState, worker: str, stage: int) -> bool:
    """Can a worker's device hold a stage, as far as is known?"""
    needed, memory = run.settings.memory_needs, run.workers[worker].memory
    return not needed or not memory or needed[stage] <= memory


def at_hand(run: RunState, replica: ReplicaState) -> list[str]:
    """Spares for a replica: those of the run's own machines first, or last if it is there because machines joined.

    Those that have been slow, or whose machine is, come behind all others.
    """
    later, known = replica.number >= run.settings.replicas, run.workers
    return sorted(run.spares, key=lambda worker: (is_slow(run, worker), bool(known[worker].host) != later))


def is_slow(run: RunState, worker: str) -> bool:
    """Has a worker been relieved because it was slow, or is its machine slow?"""
    machines = {
        run.workers[there].host
        for (fault, _), told in run.blamed.items()
        if fault == "slow host"
        for there in told.workers
    }
    return run.workers[worker].slow or run.workers[worker].host in machines


def fit_spares(run: RunState) -> int:
    """Spares that can take over any node that lacks a worker."""
    if not run.settings.memory_needs:
        return len(run.spares)
    stages = {r.arrangement.stage[node] for r in run.live.values() for node in r.vacant}
    return sum(all(has_room(run, worker, stage) for stage in stages) for worker in run.spares)
