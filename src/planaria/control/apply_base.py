"""Base of ``apply``: dispatch by kind of event, and the state changes that handlers share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import singledispatch
from typing import Any, Protocol

from planaria.control.facts import events as e
from planaria.control.state.replica import OpenRound, Phase, ReplicaState
from planaria.control.state.roster import MachineState, WorkerState
from planaria.control.state.run import RunState
from planaria.exchange.registry import make_exchange


@singledispatch
def _ignore(fact: e.Fact, run: RunState) -> RunState:
    return run


handles = _ignore.register
"""registers a handler of :func:`apply` for one or more kinds of events"""
_handlers: dict[type, Callable[[Any, RunState], RunState]] = {}


def apply(fact: e.Fact, run: RunState) -> RunState:
    """Return the state after ``fact``; purely informative events leave it unchanged."""
    kind = type(fact)
    if (handler := _handlers.get(kind)) is None:  # cached, since singledispatch is as slow as the handlers
        handler = _handlers[kind] = _ignore.dispatch(kind)
    return handler(fact, run)


def record_report(run: RunState, replica: ReplicaState, worker: str) -> RunState:
    """Record that ``worker`` completed its replica's current phase; the last worker's report ends it."""
    replica = after_report(replica, worker)
    if replica.waiting:
        return with_waiting_replica(run, replica)
    return with_replica(run, replica)


def after_report(replica: ReplicaState, worker: str) -> ReplicaState:
    """Return the replica after an expected report; the last report ends the phase.

    Phase ``run`` ends with the ``Commit`` that ``decide`` returns next.
    """
    waiting = replica.waiting.without(worker)
    if waiting or replica.phase == "run":
        return replica.updated(waiting=waiting)
    if replica.phase == "commit":
        step, inner, memory = replica.step + 1, replica.steps_since_round + 1, replica.memory
        if memory is not None:
            memory = memory.commit(replica.step, replica.holders)
        return replica.updated(
            waiting=waiting, phase="idle", step=step, steps_since_round=inner, attempts=0, memory=memory
        )
    if replica.phase == "evaluate":
        return replica.updated(waiting=waiting, phase="idle", evaluated=replica.step)
    if replica.phase == "link" and replica.handover_from:
        return replace(replica, waiting=waiting, phase="idle", handover_from={})
    return replica.updated(waiting=waiting, phase="idle")


def without_round(replica: ReplicaState) -> ReplicaState:
    """Return the replica without the current round, in which it can no longer take part.

    In synchronised exchanges the round remains ahead: it is repeated, or adopted if others settle it.
    """
    rule = make_exchange(replica.started.exchange)
    if replica.open_round is None or not rule.synchronised:
        return replace(replica, open_round=None)
    return replace(
        replica,
        open_round=None,
        rounds=replica.open_round.round,
        steps_since_round=replica.steps_since_round + (rule.interval or 0),
    )


def leave_open_round(run: RunState, open_round: OpenRound | None) -> RunState:
    """Remove a departed replica from its round and notify the rest.

    A synchronised replica that remains alone joins a later round, unless others have settled this one.
    """
    if open_round is None:
        return run
    remaining = [r for r in run.live.values() if r.open_round and r.open_round.round == open_round.round]
    if len(remaining) == 1 and run.exchange.synchronised and not open_round.contributors:
        return with_replica(run, without_round(remaining[0]))
    return reconsider(run, remaining)


def give_up_save(run: RunState) -> RunState:
    """Cancel the checkpoint for which replicas were being saved."""
    return run.changed(saving=-1, positions={}, allocation=run.allocation.give_up_save())


def give_up_if_none_is_saved(run: RunState) -> RunState:
    """Restart a checkpoint of which no replica's part is left."""
    if run.saving >= 0 and all(replica.saved != run.saving for replica in run.live.values()):
        return give_up_save(run)
    return run


def end_background_write(run: RunState, worker: str) -> RunState:
    """Record that a background write of ``worker`` has ended, successfully or not."""
    return run.changed(writing={w: part for w, part in run.writing.items() if w != worker})


def set_workers(run: RunState, changed: Mapping[str, WorkerState]) -> RunState:
    return run.changed(roster=run.roster.with_workers(changed))


def set_machine(run: RunState, name: str, machine: MachineState) -> RunState:
    return run.changed(roster=run.roster.with_machine(name, machine))


def with_failed_starts(run: RunState, host: str, count: int) -> RunState:
    """Record the count of consecutive workers that died on a machine before they joined."""
    if not host:
        return run.changed(failed_starts=count)
    return set_machine(run, host, replace(run.machines[host], failed_starts=count))


def with_replica(run: RunState, replica: ReplicaState) -> RunState:
    """Return the run with this replica's new state.

    A committed step uses its samples, and its rejected gradients are recorded.
    """
    before, allocation = run.replicas[replica.number], run.allocation
    if before.phase == "commit" and replica.step > before.step and (before.rejected or run.suspicion.now):
        run = run.updated(suspicion=run.suspicion.end_round(before.step, before.rejected, run.exchange))
    if before.phase == "commit" and replica.step > before.step:
        memory = replica.memory
        allocation = allocation.commit(replica.number, None if memory is None else replica.step - memory.step)
    undecided = run.undecided | {replica.number}
    if run.started.max_replicas > 1 and run.exchange.decoupled:
        undecided = run.replicas.numbers  # whether a round begins depends on all
    return run.updated(replicas=run.replicas.with_replica(replica), allocation=allocation, undecided=undecided)


def reconsider(run: RunState, replicas: Iterable[ReplicaState]) -> RunState:
    """Return the run after a change that may affect what these replicas do next."""
    return run.updated(undecided=run.undecided | {replica.number for replica in replicas})


def with_waiting_replica(run: RunState, replica: ReplicaState) -> RunState:
    """Return the run with this replica's new state, on which no decision depends yet."""
    return run.updated(replicas=run.replicas.with_replica(replica))


def mark_decided(run: RunState) -> RunState:
    """Return the run after ``decide`` returned None, until something changes."""
    return run.updated(undecided=frozenset()) if run.undecided else run


class WorkerReport(Protocol):
    """An event that a worker reports in a generation of its replica."""

    @property
    def worker(self) -> str: ...

    @property
    def generation(self) -> int: ...


def replica_answered_by(run: RunState, fact: WorkerReport, phase: Phase) -> ReplicaState | None:
    """Return the replica whose current phase and generation this report answers."""
    replica = run.replicas.of(fact.worker)
    if replica is None or replica.phase != phase or replica.generation != fact.generation:
        return None
    return replica if fact.worker in replica.waiting else None
