"""Handlers of ``apply`` for lost workers, broken edges and new generations. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planaria.control.apply_base import (
    after_report,
    end_background_write,
    give_up_if_none_is_saved,
    give_up_save,
    handles,
    leave_open_round,
    set_workers,
    with_failed_starts,
    with_replica,
    without_round,
)
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.memory_snapshots import MemorySnapshot
from planaria.control.state.replica import NO_WORKERS, ReplicaState, WorkerSet
from planaria.control.state.roster import Status
from planaria.control.state.run import RunState


@handles
def on_worker_lost(fact: e.WorkerLost, run: RunState) -> RunState:
    worker = run.workers.get(fact.worker)
    if worker is None or worker.status == "dead" or worker.incarnation != fact.incarnation:
        return run
    run = set_workers(run, {fact.worker: replace(worker, status="dead")})
    if worker.status == "starting" and fact.cause != "controller":
        before = run.machines[worker.host].failed_starts if worker.host else run.failed_starts
        run = with_failed_starts(run, worker.host, before + 1)
    if run.over:
        return run
    replica = run.replica_of(fact.worker)
    if replica is not None:
        lost = frozenset(node for node, holder in replica.holders.items() if holder == fact.worker)
        run = _lose(run, replica, fact.worker, lost)
    if fact.worker in run.writing:
        run = _drop_unfinished_file(run, fact.worker)
    for receiver in run.live.values():
        if (without_sender := _without_sender(receiver, fact.worker)) is not receiver:
            run = with_replica(run, without_sender)
    return run


def _without_sender(replica: ReplicaState, worker: str) -> ReplicaState:
    """Return the replica after a worker died that may have been about to transfer a state to it."""
    remaining = {node: leaver for node, leaver in replica.handover_from.items() if leaver != worker}
    cancelled = replica.handover_from.keys() - remaining.keys()
    if cancelled:
        replica = replace(replica, handover_from=remaining)
    waited_for = cancelled & replica.lost or worker in replica.donor_workers.values()
    if replica.phase == "link" and waited_for and replica.broken:
        return replace(replica, phase="idle", waiting=NO_WORKERS)
    return replica


def _lose(run: RunState, replica: ReplicaState, worker: str, lost: frozenset[int]) -> RunState:
    """Record the death of a member that held the nodes ``lost``."""
    run = run.changed(failed_starts=0)  # a lost spare may free a slot; retry the stage
    return give_up_if_none_is_saved(
        leave_open_round(with_replica(run, _without_holder(replica, worker, lost)), replica.open_round)
    )


def _drop_unfinished_file(run: RunState, worker: str) -> RunState:
    """Drop the unfinished file of a dead worker and its replica's part of the checkpoint."""
    part = run.writing[worker]
    if run.is_current_write(part):
        run = with_replica(run, run.replicas[part.replica].updated(saved=-1))
    return give_up_if_none_is_saved(end_background_write(run, worker))


def _without_holder(replica: ReplicaState, worker: str, missing: frozenset[int]) -> ReplicaState:
    """Return the replica without the worker that held the nodes ``missing``."""
    initial = _initial_sources(replica)
    remaining = {n: o for n, o in replica.origins.items() if n not in missing or not isinstance(o, d.Recall)}
    origins = {**remaining, **{n: initial[n] for n in missing if n in initial}}
    lost = (replica.lost | missing) - origins.keys()
    behind = {node: holder for node, holder in replica.behind.items() if node not in missing}
    replica = replace(
        without_round(replica),
        holders={n: w for n, w in replica.holders.items() if w != worker},
        origins=origins,
        lost=frozenset(lost),
        behind=behind,
        links={p: i for p, i in replica.links.items() if not set(p) & set(missing)},
        memory=replica.memory and replica.memory.without(missing),
    )
    if replica.phase in ("commit", "settle"):  # the others finish what cannot be undone
        return after_report(replica, worker)
    if replica.phase == "save":  # and their open files, so that no file is written by two workers or removed meanwhile
        another = {replica.arrangement.stage[node] for node in missing} & set(replica.stateful.stages)
        last = replica.unrecoverable_reason and not another
        return after_report(replica if last else replace(replica, saved=-1), worker)
    return replace(replica, phase="idle", waiting=NO_WORKERS)


@handles
def on_edge_broken(fact: e.EdgeBroken, run: RunState) -> RunState:
    replica = run.replica_of(fact.worker)
    if replica is None or fact.generation != replica.generation:
        return run
    pair = (min(fact.node, fact.peer), max(fact.node, fact.peer))
    run = run.updated(gauges=run.gauges.with_break(*pair, fact.generation))
    if fact.relay and fact.relay not in run.unreachable_relays:
        run = _without_relay(run, fact.relay, fact.cause)
        replica = run.replicas[replica.number]
    stalled = (*replica.stalled, fact) if fact.waited_s else replica.stalled
    if fact.invalid and replica.holders.get(fact.node) == fact.worker and pair in replica.links:
        rejection = replica.links[pair], fact.worker, replica.holders.get(fact.peer, "")
        replica = replace(
            replica,
            rejections=replica.rejections | {rejection},
            last_edge_failure=fact.detail,
            explained=fact.generation,
        )
    elif fact.cause and fact.generation != replica.explained:
        replica = replace(replica, last_edge_failure=fact.detail)
    return with_replica(run, replace(replica, broken_edges=replica.broken_edges | {pair}, stalled=stalled))


@handles
def on_grace_expired(fact: e.GraceExpired, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    if fact.generation != replica.generation or not replica.broken_edges or replica.phase == "left" or run.over:
        return run
    open_round = replica.open_round
    links = {pair: link for pair, link in replica.links.items() if pair not in replica.broken_edges}
    if links.keys() != replica.links.keys():  # workers drop received updates when they form
        replica = replace(without_round(replica), links=links, avoided_relays=_relays_to_avoid(replica))
    possible = {n: w for n, w in replica.handover_from.items() if (d.PREDECESSOR, n) not in replica.broken_edges}
    replica = replace(replica, handover_from=possible)
    # An edge that transferred a state may be blamed after the transfer is complete: nothing is lost. A commit uses no
    # edges and must not be interrupted; it ends first.
    if replica.broken and replica.phase not in ("commit", "settle", "save"):
        replica = replace(replica, phase="idle", waiting=NO_WORKERS)
    run = with_replica(run, replica)
    return run if replica.open_round else leave_open_round(run, open_round)


@handles
def on_relay_silent(fact: e.RelaySilent, run: RunState) -> RunState:
    return _without_relay(run, fact.relay, fact.detail)


def _without_relay(run: RunState, relay: str, error: str) -> RunState:
    """Return the run after a relay stopped answering. Its edges move to another relay, if there is one."""
    run = run.changed(unreachable_relays={**run.unreachable_relays, relay: error})
    for replica in run.live.values():
        links = {pair: link for pair, link in replica.links.items() if replica.relay_of_edge.get(pair) != relay}
        if links.keys() == replica.links.keys() or run.cut_off:
            continue
        open_round, replica = replica.open_round, replace(without_round(replica), links=links)
        if replica.phase not in ("commit", "settle", "save"):  # these use no edges, and end first
            replica = replace(replica, phase="idle", waiting=NO_WORKERS)
        run = with_replica(run, replica)
        run = run if replica.open_round else leave_open_round(run, open_round)
    return run


@handles
def on_relay_answers(fact: e.RelayAnswers, run: RunState) -> RunState:
    unreachable = {relay: error for relay, error in run.unreachable_relays.items() if relay != fact.relay}
    return run.changed(unreachable_relays=unreachable, relays_given_up=False)


@handles
def on_relays_given_up(fact: e.RelaysGivenUp, run: RunState) -> RunState:
    return run.changed(relays_given_up=True)


def _relays_to_avoid(replica: ReplicaState) -> frozenset[str]:
    """Return the relays to avoid: all relays of broken edges, or only the newest ones if that would leave none."""
    blamed = frozenset(replica.relay_of_edge[pair] for pair in replica.broken_edges if pair in replica.relay_of_edge)
    relays = replica.started.relays.keys()
    return next((few for few in (replica.avoided_relays | blamed, blamed) if few != relays), frozenset())


def _initial_sources(replica: ReplicaState) -> Mapping[int, d.Source]:
    """Return exact sources of the nodes' current state: the run's start, as long as no step is committed."""
    start = ReplicaState.start(replica.started, replica.number)
    moved = replica.phase in ("commit", "settle") or replica.position != start.position
    return {} if moved else start.origins


@handles
def on_form(fact: d.Form, run: RunState) -> RunState:
    replica = _form_replica(run, run.replicas[fact.replica], fact)
    status: dict[str, Status] = dict.fromkeys(replica.handover_from.values(), "spare")
    status |= dict.fromkeys((member.worker for member in fact.members), "member")
    workers = run.workers
    run = set_workers(run, {w: replace(workers[w], status=s) for w, s in status.items() if workers[w].status != s})
    match fact.outcome:
        case "rolled back":
            unsaved = run.unsaved and replace(run.unsaved, since=-1, rested=True)
            saved, allocation = min(run.saved, run.durable.step), run.allocation.roll_back(fact.replica)
            run = give_up_save(replace(run, allocation=allocation, saved=saved, unsaved=unsaved))
            run = _roll_back_dependents(run, replica)
        case "recalled":
            run = give_up_save(replace(run, allocation=run.allocation.undo_since_snapshot(fact.replica)))
    return with_replica(run, replica)


def _roll_back_dependents(run: RunState, leader: ReplicaState) -> RunState:
    """Roll back with a replica that lost a stage of which no copy was left.

    Synchronised replicas that also lack the stage and have settled no more rounds copy the leader whole, since their
    remaining states may have been rebuilt since.
    """
    if not run.exchange.synchronised:
        return run
    for other in run.live.values():
        if other.number != leader.number and other.rounds <= leader.rounds and other.lost - other.handover_from.keys():
            run = with_replica(run, invalidate_states(other))
    return run


def invalidate_states(replica: ReplicaState) -> ReplicaState:
    """Mark all states of the replica as to be copied from another one."""
    nodes = frozenset(replica.arrangement.stage)
    return replace(replica, lost=nodes, handover_from={}, origins={}, open_round=None, behind={})


def _form_replica(run: RunState, replica: ReplicaState, form: d.Form) -> ReplicaState:
    rebuilt = {m.node for m in form.members if isinstance(m.source, d.Rebuild)}
    origins, staleness = dict(replica.origins), dict(replica.staleness)
    for member in form.members:
        if isinstance(member.source, d.Fresh | d.Load | d.Recall):
            origins[member.node] = member.source
        if not isinstance(member.source, d.Keep):
            staleness[member.node] = 0
    nodes = {member.node for member in form.members}
    donors = {n for m in form.members if isinstance(m.source, d.Rebuild) for n in m.source.donors}
    holders = form.holders
    handovers = {**replica.handover_from, **form.handover_from}
    pending = {n: w for n, w in handovers.items() if holders.get(n) != w and not form.is_rollback}
    kept = {node for node, worker in replica.handover_from.items() if holders.get(node) == worker}
    return replace(
        replica,
        phase="link",
        generation=form.generation,
        step=form.step,
        formed_at_step=form.step,
        attempts=replica.attempts + (form.outcome != "handed over"),  # a planned handover is not a failed attempt
        holders=holders,
        skipped=frozenset(replica.arrangement.stage) - nodes,
        origins=origins,
        staleness=staleness,
        lost=frozenset(rebuilt) if form.is_rollback else (replica.lost - kept) | form.handover_from.keys(),
        donor_workers={donor: run.holders[donor] for donor in sorted(donors - replica.arrangement.stage.keys())},
        handover_from=pending,
        links={(link.low, link.high): link.id for link in form.links},
        relay_of_edge={(link.low, link.high): link.relay for link in form.links if link.relay},
        broken_edges=frozenset(),
        stalled=(),
        routes=form.routes,
        waiting=WorkerSet(m.worker for m in form.members),
        evaluated=min(replica.evaluated, form.step),
        rounds=form.rounds,
        steps_since_round=form.inner,
        behind={m.node: m.worker for m in form.members if isinstance(m.source, d.CatchUp)},
        settled_at=_nodes_settled(run, replica, form),
        memory=replica.memory and _nodes_with_snapshot(replica.memory, form),
    )


def _nodes_settled(run: RunState, replica: ReplicaState, form: d.Form) -> Mapping[int, int]:
    """Return :attr:`ReplicaState.settled_at` after the replica received the rounds that it had missed."""
    if form.is_rollback:
        saved = run.durable.positions.get(replica.number)
        return saved.settled_rounds if saved else {}
    if not run.exchange.decoupled or form.rounds <= replica.rounds:
        return replica.settled_at
    recent = range(form.rounds - run.exchange.cycle, form.rounds)
    return {round: replica.received_at(round) if round < replica.rounds else form.step for round in recent}


def _nodes_with_snapshot(memory: MemorySnapshot, form: d.Form) -> MemorySnapshot:
    """Return the content of memory after ``form`` is linked."""
    if form.outcome == "rolled back":
        return memory.void()
    renewed = {m.node: m.source for m in form.members if not isinstance(m.source, d.Keep | d.Recall)}
    restored = {node for node, s in renewed.items() if isinstance(s, d.Rebuild) and s.by == memory.strategy}
    formed = memory.form(renewed, restored)
    return formed if all(isinstance(m.source, d.Keep) for m in form.members) else formed.restart()
