"""Exclusion of replicas whose updates are invalid. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from planaria.control.facts import decisions as d
from planaria.control.spares import count_leaving_nodes, count_suitable_spares, workers_sending_state
from planaria.control.state.replica import ReplicaState
from planaria.control.state.roster import MAX_FAILED_STARTS
from planaria.control.state.run import RunState


def exclude_member(run: RunState, replica: ReplicaState) -> d.ExcludeMember | None:
    """Dismiss the workers of a replica, or of a Byzantine one among replicas that make each step together."""
    enough = run.started.exchange.strikes
    if not enough or not run.suspicion.rejections or replica.open_round or run.stopping or run.allocation.done:
        return None
    for member, nodes in _members(run, replica):
        strikes = run.suspicion.strikes(member, run.exchange)
        workers = {replica.holders[node] for node in nodes}
        if strikes < enough or workers & workers_sending_state(run):
            continue
        if _replaceable(run, workers) or _dispensable(run):
            when = "rounds" if run.exchange.has_rounds else "steps"
            reason = f"the updates of replica {member} were invalid in {strikes} {when}"
            return d.ExcludeMember(member=member, workers=sorted(workers), strikes=strikes, reason=reason)
    return None


def _members(run: RunState, replica: ReplicaState) -> Iterator[tuple[int, Collection[int]]]:
    """Yield the members of the exchange by number with their nodes: replicas, or the parts of a step made together."""
    if run.exchange.has_rounds:
        yield replica.number, replica.arrangement.stage
        return
    columns = [replica.arrangement.nodes(stage) for stage in replica.arrangement.stages]
    yield from enumerate(zip(*columns, strict=True))


def _replaceable(run: RunState, workers: Collection[str]) -> bool:
    if count_suitable_spares(run) - run.vacancies - count_leaving_nodes(run) >= len(workers):
        return True
    at_home = not any(run.workers[worker].host for worker in workers)
    return run.started.replace and at_home and run.failed_starts < MAX_FAILED_STARTS


def _dispensable(run: RunState) -> bool:
    """Return whether the others can continue with one replica fewer; replicas that make each step together cannot."""
    remaining = len(run.live) - 1
    return run.exchange.has_rounds and remaining > 0 and not run.exchange.why_unsupported(remaining)
