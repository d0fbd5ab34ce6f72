"""Replicas whose offers are of no use again and again: their workers are sent away, and others stand in their place.

Pure. One strike never suffices (``exchange.strikes``), nor what as many as may lie say of another
(``record/refusals.py``). Who is sent away is lost like any worker that dies, so that all that follows is as after a
death: a spare takes over a copy of another replica's stage, or a new worker does, or the run goes on without the
replica. Machines that have joined go with their workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from planaria.control.spares import fit_spares
from planaria.control.staffing import giving, leaving
from planaria.record import decisions as d
from planaria.record.replica import ReplicaState
from planaria.record.roster import MAX_STILLBORN
from planaria.record.state import RunState


def send_away(run: RunState, replica: ReplicaState) -> d.SendAway | None:
    """Send the workers of a replica away, or those of one of several that make each step together."""
    enough = run.settings.exchange.strikes
    if not enough or not run.suspicion.refusals or replica.meeting or run.stopping or run.allotment.done:
        return None
    for member, nodes in _members(run, replica):
        strikes, workers = run.suspicion.strikes(member, run.rule), {replica.holders[node] for node in nodes}
        if strikes >= enough and not workers & giving(run) and (_others(run, workers) or _dispensable(run)):
            reason = (
                f"what replica {member} says was of no use in {strikes} {'rounds' if run.rule.interval else 'steps'}"
            )
            return d.SendAway(member=member, workers=sorted(workers), strikes=strikes, reason=reason)
    return None


def going(run: RunState, replica: ReplicaState) -> bool:
    """Are workers of it on their way out? Until they are gone, nothing new is begun with it."""
    released = run.with_status("released")
    return bool(released) and any(run.replicas.standing.get(worker) == replica.number for worker in released)


def _members(run: RunState, replica: ReplicaState) -> Iterator[tuple[int, Collection[int]]]:
    """Those that agree, by number, and the nodes of each: replicas that meet, or those that make a step together."""
    if run.rule.interval:
        yield replica.number, replica.arrangement.stage
        return
    columns = [replica.arrangement.nodes(stage) for stage in replica.arrangement.stages]
    yield from enumerate(zip(*columns, strict=True))


def _others(run: RunState, workers: Collection[str]) -> bool:
    """Are there others to stand where these do: spares, or new ones that are started for them?"""
    if fit_spares(run) - run.vacancies - leaving(run) >= len(workers):
        return True
    at_home = not any(run.workers[worker].host for worker in workers)
    return run.settings.replace and at_home and run.stillborn < MAX_STILLBORN


def _dispensable(run: RunState) -> bool:
    """Can the others go on with a replica less? Those that make each step together need all."""
    left = len(run.live) - 1
    return bool(run.rule.interval) and left > 0 and not run.rule.misfit(left)
