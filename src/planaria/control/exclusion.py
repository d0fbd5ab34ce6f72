"""Exclusion of replicas whose updates are invalid, and of workers whose messages are. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from planaria.control.facts import decisions as d
from planaria.control.machine_loss_costs import plan_of_loss
from planaria.control.spares import count_leaving_nodes, has_room, workers_sending_state
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


REJECTIONS = 2
"""connections over which a worker sends invalid messages in the repetitions of a step, before a worker is excluded"""


def exclude_invalid_sender(run: RunState, replica: ReplicaState) -> d.ExcludeMember | None:
    """Dismiss the worker whose messages its neighbour rejects in every repetition of a step.

    The rejection proves that one of the two is faulty, not which one. Each machine is believed once; when its workers
    reject another sender's messages, the one that does is dismissed itself. Nothing is lost that cannot be rebuilt.
    """
    if not replica.rejections or run.stopping or run.allocation.done:
        return None
    counts = Counter((receiver, sender) for _, receiver, sender in sorted(replica.rejections))
    stages = {worker: replica.arrangement.stage[node] for node, worker in replica.holders.items()}
    for (accuser, accused), count in counts.items():
        if count < REJECTIONS or not {accuser, accused} <= stages.keys():
            continue
        worker = accuser if run.machine_or_worker(accuser) in run.accusers else accused
        if worker in workers_sending_state(run) or not _expendable(run, worker, stages[worker]):
            continue
        reason = f"worker {accuser} rejected messages of worker {accused} in {count} repetitions of a step"
        if worker == accuser:
            reason += "; an earlier one was excluded on the word of its machine"
        return d.ExcludeMember(member=replica.number, workers=[worker], strikes=count, reason=reason, accuser=accuser)
    return None


def _expendable(run: RunState, worker: str, stage: int) -> bool:
    """Return whether another worker can take over from this one, and others can rebuild its stage and lose no other."""
    alone = len(_leaving_nodes(run, {worker})) == 1
    rebuilt = len(run.live) > 1 or not plan_of_loss(run.started.chain, frozenset({stage})).reason
    return alone and rebuilt and _replaceable(run, {worker})


def _members(run: RunState, replica: ReplicaState) -> Iterator[tuple[int, Collection[int]]]:
    """Yield the members of the exchange by number with their nodes: replicas, or the parts of a step made together."""
    if run.exchange.has_rounds:
        yield replica.number, replica.arrangement.stage
        return
    columns = [replica.arrangement.nodes(stage) for stage in replica.arrangement.stages]
    yield from enumerate(zip(*columns, strict=True))


def _replaceable(run: RunState, workers: Collection[str]) -> bool:
    """Return whether spares of other machines, or new workers, can take over from ``workers`` and from all that leave
    with them."""
    hosts, leaving = _hosts(run, workers), _leaving_nodes(run, workers)
    stages = {run.started.stage_of[node] for node in leaving}
    others = (spare for spare in run.spares if run.workers[spare].host not in hosts)
    spares = sum(all(has_room(run, spare, stage) for stage in stages) for spare in others)
    if spares - run.vacancies - count_leaving_nodes(run) >= len(leaving):
        return True
    return run.started.replace and not hosts and run.failed_starts < MAX_FAILED_STARTS


def _leaving_nodes(run: RunState, workers: Collection[str]) -> list[int]:
    """Return the nodes of these workers and of all others on the joined machines that leave with them."""
    hosts = _hosts(run, workers)
    return [node for node, holder in run.holders.items() if holder in workers or run.workers[holder].host in hosts]


def _hosts(run: RunState, workers: Collection[str]) -> set[str]:
    return {run.workers[worker].host for worker in workers} - {""}


def _dispensable(run: RunState) -> bool:
    """Return whether the others can continue with one replica fewer; replicas that make each step together cannot."""
    remaining = len(run.live) - 1
    return run.exchange.has_rounds and remaining > 0 and not run.exchange.why_unsupported(remaining)
