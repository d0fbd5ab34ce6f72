"""What ``apply`` is made of: its one name for all kinds of facts, and the small changes that facts share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import singledispatch
from types import MappingProxyType
from typing import Any

from planaria.control import events as e
from planaria.control.allotment import Allotment
from planaria.control.copied import copied
from planaria.control.replica import OpenRound, ReplicaState, go_on
from planaria.control.roster import Host, WorkerState
from planaria.control.state import RunState
from planaria.exchange.kinds import exchange

NOTHING: frozenset[int] = frozenset()


@singledispatch
def _unmoved(fact: e.Fact, run: RunState) -> RunState:
    return run


handles = _unmoved.register
"""marks what :func:`apply` does for one kind of facts, or several"""
_handlers: dict[type, Callable[[Any, RunState], RunState]] = {}


def apply(fact: e.Fact, run: RunState) -> RunState:
    """The state after ``fact``; facts that only inform leave it as it is."""
    kind = type(fact)
    if (handler := _handlers.get(kind)) is None:  # looked up once: singledispatch takes as long as what it finds
        handler = _handlers[kind] = _unmoved.dispatch(kind)
    return handler(fact, run)


def report(run: RunState, replica: ReplicaState, worker: str) -> RunState:
    """``worker`` has done what the present phase of its replica waits for. Before the last one has, nothing follows."""
    replica = reported(replica, worker)
    if replica.waiting:
        return noted(run, replica)
    return with_replica(run, replica)


def reported(replica: ReplicaState, worker: str) -> ReplicaState:
    """One report less to wait for; the last one ends the phase. A run's commit is ``decide``'s to order first."""
    waiting = replica.waiting.without(worker)
    if waiting or replica.phase == "run":
        return go_on(replica, waiting=waiting)
    if replica.phase == "commit":
        step, inner, memory = replica.step + 1, replica.inner + 1, replica.memory
        if memory is not None:
            memory = memory.committed(replica.step, replica.holders)
        return go_on(replica, waiting=waiting, phase="idle", step=step, inner=inner, attempts=0, memory=memory)
    if replica.phase == "evaluate":
        return go_on(replica, waiting=waiting, phase="idle", evaluated=replica.step)
    if replica.phase == "link" and replica.leavers:
        return replace(replica, waiting=waiting, phase="idle", leavers=freeze({}))
    return go_on(replica, waiting=waiting, phase="idle")


def out_of_round(replica: ReplicaState) -> ReplicaState:
    """The replica when it can take part no more in the round under way; no trace of that is left here.

    Where all must stay synchronised the round is still before it: to be made again, or adopted if others settle it.
    """
    rule = exchange(replica.settings.exchange)
    if replica.meeting is None or not rule.synchronised:
        return replace(replica, meeting=None)
    return replace(replica, meeting=None, rounds=replica.meeting.round, inner=replica.inner + (rule.interval or 0))


def call_off(run: RunState, meeting: OpenRound | None) -> RunState:
    """Somebody has left a round, which concerns those that are in it still. Who must stay like the others, and is left
    alone with it, will meet them again."""
    if meeting is None:
        return run
    left = [r for r in run.live.values() if r.meeting and r.meeting.round == meeting.round]
    if len(left) == 1 and run.rule.synchronised:
        return with_replica(run, out_of_round(left[0]))
    return concerning(run, left)


def give_up_save(run: RunState) -> RunState:
    """The checkpoint for which replicas were being saved will not be sealed."""
    return anew(replace(run, saving=-1, standings=freeze({}), allotment=run.allotment.give_up_save()))


def give_up_if_none_is_saved(run: RunState) -> RunState:
    """A checkpoint of which no replica's part is left has to begin anew."""
    if run.saving >= 0 and all(replica.saved != run.saving for replica in run.live.values()):
        return give_up_save(run)
    return run


def written(run: RunState, worker: str) -> RunState:
    """``worker`` writes no more, whatever has come of it."""
    return anew(replace(run, writing=freeze({w: part for w, part in run.writing.items() if w != worker})))


def set_workers(run: RunState, changed: Mapping[str, WorkerState]) -> RunState:
    return anew(replace(run, roster=run.roster.with_workers(changed)))


def set_host(run: RunState, name: str, host: Host) -> RunState:
    return anew(replace(run, roster=run.roster.with_host(name, host)))


def stillborn(run: RunState, host: str, count: int) -> RunState:
    """So many workers in a row have now died on a host before they had joined."""
    if not host:
        return anew(replace(run, stillborn=count))
    return set_host(run, host, replace(run.hosts[host], stillborn=count))


def with_replica(run: RunState, replica: ReplicaState) -> RunState:
    """The run with this replica as it now is; a step that is committed uses its samples, and is remembered of those
    whose gradients were of no use in it."""
    before, allotment, undecided = run.replicas[replica.number], run.allotment, run.undecided
    if before.phase == "commit" and replica.step > before.step and (before.refused or run.suspicion.now):
        run = copied(run, suspicion=run.suspicion.ended(before.step, before.refused, run.rule))
    if before.phase == "commit" and replica.step > before.step:
        memory = replica.memory
        allotment = allotment.commit(replica.number, None if memory is None else replica.step - memory.step)
    if undecided is not None:
        undecided |= {replica.number}
    return copied(run, replicas=run.replicas.having(replica), allotment=allotment, undecided=undecided)


def concerning(run: RunState, replicas: Iterable[ReplicaState]) -> RunState:
    """The run when others have changed what these replicas may do next."""
    if run.undecided is None:
        return run
    return copied(run, undecided=run.undecided | {replica.number for replica in replicas})


def noted(run: RunState, replica: ReplicaState) -> RunState:
    """The run with this replica as it now is, of which nothing has changed yet that a decision depends on."""
    return copied(run, replicas=run.replicas.noting(replica))


def anew(run: RunState) -> RunState:
    """The run when something has changed that may concern any replica."""
    return replace(run, undecided=None)


def taken(run: RunState, allotment: Allotment) -> RunState:
    """The run when a replica has begun a step: that is nobody else's business."""
    return copied(run, allotment=allotment)


def decided(run: RunState) -> RunState:
    """The run once ``decide`` has nothing more to say, until something changes."""
    return run if run.undecided == NOTHING else copied(run, undecided=NOTHING)


def freeze(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(mapping)


def answering(run: RunState, fact: Any, phase: str) -> ReplicaState | None:
    """The replica whose present phase, of its present generation, this report answers."""
    replica = run.replicas.of(fact.worker)
    if replica is None or replica.phase != phase or replica.generation != fact.generation:
        return None
    return replica if fact.worker in replica.waiting else None
