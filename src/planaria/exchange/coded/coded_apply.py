"""Changes of a coded step's progress by events. Pure."""

from __future__ import annotations

from dataclasses import replace

from planaria.control.apply_base import handles, replica_answered_by, with_replica
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState
from planaria.exchange.coded.coded_facts import CloseRound, CodedStep, ResultsSent, RoundLate


def first_round(run: RunState) -> CodedStep | None:
    """Return the progress of a new training step, or None without coding."""
    return CodedStep() if run.started.coded else None


@handles
def on_results_sent(fact: ResultsSent, run: RunState) -> RunState:
    replica = replica_answered_by(run, fact, "run")
    coded = None if replica is None else _in_round(replica, fact)
    if replica is None or coded is None:
        return run
    return with_replica(run, replica.updated(coded=replace(coded, sent=coded.sent | {fact.node})))


@handles
def on_round_late(fact: RoundLate, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    coded = _in_round(replica, fact)
    if replica.phase != "run" or replica.generation != fact.generation or coded is None:
        return run
    return with_replica(run, replica.updated(coded=replace(coded, late=True)))


def _in_round(replica: ReplicaState, fact: ResultsSent | RoundLate) -> CodedStep | None:
    """Return the current coded step if the event belongs to its current round."""
    coded = replica.coded
    return coded if coded is not None and (fact.step, fact.round) == (replica.step, len(coded.counted)) else None


@handles
def on_close_round(fact: CloseRound, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    coded = replica.coded
    assert coded is not None, "a round is closed in a coded step"
    return with_replica(run, replica.updated(coded=coded.next_round(frozenset(fact.counted))))
