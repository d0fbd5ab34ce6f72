"""What ``apply`` is made of: its one name for all kinds of facts, and the small changes that facts share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatch
from types import MappingProxyType
from typing import Any

from planaria.exchange import exchange
from planaria.record import events as e
from planaria.record.state import Host, OpenRound, ReplicaState, RunState, WorkerState


@singledispatch
def apply(fact: e.Fact, run: RunState) -> RunState:
    """The state after ``fact``; facts that only inform leave it as it is."""
    return run


def replica_of(run: RunState, worker: str) -> ReplicaState | None:
    """The replica in which ``worker`` stands."""
    return next((replica for replica in run.replicas.values() if worker in replica.holders.values()), None)


def reported(replica: ReplicaState, worker: str) -> ReplicaState:
    """One report less to wait for; the last one ends the phase. A run's commit is ``decide``'s to order first."""
    replica = replace(replica, waiting=replica.waiting - {worker})
    if replica.waiting or replica.phase == "run":
        return replica
    if replica.phase == "commit":
        return replace(replica, phase="idle", step=replica.step + 1, inner=replica.inner + 1, attempts=0)
    if replica.phase == "evaluate":
        return replace(replica, phase="idle", evaluated=replica.step)
    if replica.phase == "link":
        return replace(replica, phase="idle", leavers=freeze({}))
    return replace(replica, phase="idle")


def out_of_round(replica: ReplicaState) -> ReplicaState:
    """The replica when it can take part no more in the round under way; no trace of that is left here.

    Where all must stay synchronised the round is still before it: to be made again, or adopted if others settle it.
    """
    rule = exchange(replica.settings.exchange)
    if replica.meeting is None or not rule.synchronised:
        return replace(replica, meeting=None)
    return replace(replica, meeting=None, rounds=replica.meeting.round, inner=replica.inner + (rule.interval or 0))


def call_off(run: RunState, meeting: OpenRound | None) -> RunState:
    """Somebody has left a round. Who must stay like the others, and is left alone with it, will meet them again."""
    if meeting is None or not exchange(run.settings.exchange).synchronised:
        return run
    left = [r for r in run.live.values() if r.meeting and r.meeting.round == meeting.round]
    return with_replica(run, out_of_round(left[0])) if len(left) == 1 else run


def give_up_save(run: RunState) -> RunState:
    """The checkpoint for which replicas were being saved will not be sealed."""
    return replace(run, saving=-1, standings=freeze({}), allotment=run.allotment.give_up_save())


def set_worker(run: RunState, name: str, worker: WorkerState) -> RunState:
    return replace(run, workers=freeze({**run.workers, name: worker}))


def set_host(run: RunState, name: str, host: Host) -> RunState:
    return replace(run, hosts=freeze({**run.hosts, name: host}))


def with_replica(run: RunState, replica: ReplicaState) -> RunState:
    """The run with this replica as it now is; a step that is committed uses its samples."""
    before = run.replicas[replica.number]
    if before.phase == "commit" and replica.step > before.step:
        run = replace(run, allotment=run.allotment.commit(replica.number))
    return replace(run, replicas=freeze({**run.replicas, replica.number: replica}))


def freeze(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(mapping)
