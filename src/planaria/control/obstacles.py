"""What keeps a run from ending a step: which workers have not answered, and the error underneath."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from planaria.record.replica import ReplicaState
from planaria.record.state import RunState
from planaria.runtime.transport.address import parse
from planaria.runtime.transport.listener import unreachable

_MOST_PROBES = 3
"""addresses that are tried; each may take a moment"""


def held_up(run: RunState) -> str:
    """What a stop still waits for; empty if nothing, or only for files that are being written. Pure."""
    return "; ".join(filter(None, (_held_up(run, replica) for replica in run.live.values())))


def _held_up(run: RunState, replica: ReplicaState) -> str:
    whose = f" of replica {replica.number}" if run.settings.replicas > 1 else ""
    of = replica.arrangement.stage
    late = ", ".join(str(of[node]) for node, worker in sorted(replica.holders.items()) if worker in replica.waiting)
    match replica.phase:
        case "run" | "evaluate":
            return f"step {replica.step}{whose} was dropped: no result from stages {late}"
        case "link":
            return f"the edges{whose} were not open: no report from stages {late}"
        case "idle" | "replan" if not replica.whole and not replica.cannot:
            return f"no worker had the state of stages {', '.join(map(str, _missing(replica)))}{whose}"
    return f"round {replica.meeting.round}{whose} was not settled" if replica.meeting else ""


def _missing(replica: ReplicaState) -> list[int]:
    return sorted(set(replica.arrangement.stages) - set(replica.stateful.stages))


def underlying(run: RunState, reported: Mapping[str, str], probe: Callable[[str], str] = unreachable) -> str:
    """The error underneath, if one is known: as a worker ``reported`` it, as an edge broke, or as a connection from
    here to a worker that has not answered fails."""
    for worker in _awaited(run):
        if reported.get(worker):
            return f"worker {worker}: {reported[worker]}"
    if trouble := next((replica.trouble for replica in run.live.values() if replica.trouble), ""):
        return trouble
    addresses = [at for worker in _awaited(run) if (at := parse(run.workers[worker].at).outside)]
    return next(filter(None, map(probe, addresses[:_MOST_PROBES])), "")


def _awaited(run: RunState) -> Iterator[str]:
    for replica in run.live.values():
        yield from sorted(replica.waiting)
