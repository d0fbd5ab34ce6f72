"""Reasons that delay a stop, and the underlying error of a run that waits for workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from planaria.common.address import Address
from planaria.config.names import stages
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState

_MAX_PROBES = 3
"""maximum number of addresses to probe; each probe may block briefly"""


def stop_blockers(run: RunState) -> str:
    """Return the activities that delay a stop, or an empty string if there are none but background writes. Pure."""
    return "; ".join(filter(None, (_blocker(run, replica) for replica in run.live.values())))


def _blocker(run: RunState, replica: ReplicaState) -> str:
    whose = f" of replica {replica.number}" if run.started.max_replicas > 1 else ""
    stage_of = replica.arrangement.stage
    late = stages(stage_of[node] for node, worker in replica.holders.items() if worker in replica.waiting)
    match replica.phase:
        case "run" | "evaluate":
            return f"step {replica.step}{whose} was dropped: no result from {late}"
        case "link":
            return f"the edges{whose} were not open: no report from {late}"
        case "idle" | "replan" if not replica.whole and not replica.unrecoverable_reason:
            return f"no worker had the state of {stages(replica.missing_stages)}{whose}"
    return f"round {replica.open_round.round}{whose} was not settled" if replica.open_round else ""


def underlying_error(run: RunState, reported: Mapping[str, str], probe: Callable[[str], str]) -> str:
    """Return the underlying error, if known: ``reported`` by a worker, of a broken edge, or of a silent worker.

    :param probe: returns why an address (HOST:PORT) is unreachable, or an empty string if it is reachable.
    """
    for worker in _awaited_workers(run):
        if reported.get(worker):
            return f"worker {worker}: {reported[worker]}"
    if trouble := next((replica.last_edge_failure for replica in run.live.values() if replica.last_edge_failure), ""):
        return trouble
    addresses = [at for worker in _awaited_workers(run) if (at := Address.parse(run.workers[worker].at).outside)]
    return next(filter(None, map(probe, addresses[:_MAX_PROBES])), "")


def _awaited_workers(run: RunState) -> Iterator[str]:
    for replica in run.live.values():
        yield from sorted(replica.waiting)
