"""``apply(fact, state)``: the state of the run after one more event or decision. Pure.

Events of an older generation, or of a worker that counts as dead, change nothing. Events are handled here, losses and
new generations in ``control/apply_membership.py``, other decisions in ``control/apply_decisions.py``.
"""

from __future__ import annotations

from dataclasses import replace

from planaria.config.names import replica_name
from planaria.control import apply_decisions, apply_membership  # noqa: F401 (register their handlers)
from planaria.control.apply_base import (
    after_report,
    apply,
    end_background_write,
    give_up_save,
    handles,
    reconsider,
    record_report,
    replica_answered_by,
    set_machine,
    set_workers,
    with_failed_starts,
    with_replica,
    with_waiting_replica,
    without_round,
)
from planaria.control.facts import events as e
from planaria.control.state.replica import NO_WORKERS, ReplicaState
from planaria.control.state.rollback import RollbackPoint
from planaria.control.state.roster import MachineState, WorkerState
from planaria.control.state.run import BackgroundWrite, RunState, UnsavedCheckpoint

__all__ = ["apply"]


@handles
def on_run_started(fact: e.RunStarted, run: RunState) -> RunState:
    return RunState.start(fact)


@handles
def on_leader_started(fact: e.LeaderStarted, run: RunState) -> RunState:
    run = run.changed(term=fact.term)
    if run.over or not (fact.orders_lost or fact.cause == "silent"):
        return run
    if not fact.has_checkpoint:
        run = replace(run, durable=RollbackPoint(), saved=-1)
    for replica in run.live.values():
        run = with_replica(run, _without_orders_in_flight(replica))
    return replace(give_up_save(run), writing={}, unsaved=None, unsealed=None)


def _without_orders_in_flight(replica: ReplicaState) -> ReplicaState:
    """Return the replica after its orders and reports in flight were lost: only commits and settled rounds remain."""
    replica = replace(without_round(replica), links={}, saved=-1)
    if replica.phase in ("commit", "settle"):  # the order is durable and is sent again
        return replica
    return replace(replica, phase="idle", waiting=NO_WORKERS, coded=None)


@handles
def on_worker_joined(fact: e.WorkerJoined, run: RunState) -> RunState:
    worker = run.workers.get(fact.worker, WorkerState(fact.incarnation, "starting"))
    timed = replace(worker, memory=fact.memory, layer_s=fact.layer_s)
    spare = replace(timed, incarnation=fact.incarnation, status="spare", pid=fact.pid, at=fact.at)
    run = with_failed_starts(set_workers(run, {fact.worker: spare}), worker.host, 0)
    for replica in run.live.values():
        # With one more worker, the plan in search may not be needed.
        run = with_replica(run, replace(replica, phase="idle")) if replica.phase == "replan" else run
    return run


@handles
def on_worker_leaving(fact: e.WorkerLeaving, run: RunState) -> RunState:
    worker = run.workers.get(fact.worker)
    if worker is None or worker.status == "dead" or worker.incarnation != fact.incarnation:
        return run
    if worker.status == "member":  # a lost spare may free a slot; retry the stage
        run = replace(run, failed_starts=0)
    return set_workers(run, {fact.worker: replace(worker, leaving=True)})


@handles
def on_host_joined(fact: e.HostJoined, run: RunState) -> RunState:
    return replace(set_machine(run, fact.host, MachineState(fact.workers)), join_timed_out=False)


@handles
def on_join_timed_out(fact: e.JoinTimedOut, run: RunState) -> RunState:
    return run.changed(join_timed_out=True)


@handles
def on_host_left(fact: e.HostLeft, run: RunState) -> RunState:
    return set_machine(run, fact.host, replace(run.machines[fact.host], workers=0))


@handles
def on_worker_measurements(fact: e.WorkerMeasurements, run: RunState) -> RunState:
    replica = run.replica_of(fact.worker)
    if replica is None or replica.generation != fact.generation or replica.holders.get(fact.node) != fact.worker:
        return run
    run = run.updated(gauges=run.gauges.with_measurements(fact))
    # Whether to act on slow workers depends on a clock that all replicas share.
    return reconsider(run, run.live.values() if run.blamed else [replica])


@handles
def on_linked(fact: e.Linked, run: RunState) -> RunState:
    replica = replica_answered_by(run, fact, "link")
    if replica is None:
        return run
    run = run.updated(gauges=run.gauges.with_linking(fact.link_s + fact.transfer_s + fact.rebuild_s))
    if replica.memory is not None:
        replica = replica.updated(memory=replica.memory.link(fact.node))
    if fact.node not in replica.origins and fact.node not in replica.lost:  # it already had its state
        return record_report(run, replica, fact.worker)
    origins = {node: source for node, source in replica.origins.items() if node != fact.node}
    replica = replace(replica, origins=origins, lost=replica.lost - {fact.node})
    return with_replica(run, after_report(replica, fact.worker))


@handles
def on_stage_ready(fact: e.StageReady, run: RunState) -> RunState:
    replica = replica_answered_by(run, fact, "run") or replica_answered_by(run, fact, "evaluate")
    if replica is None or fact.step != replica.step:
        return run
    if fact.received:
        replica = replica.updated(received={**replica.received, fact.worker: fact.received})
    return record_report(run, replica, fact.worker)


@handles
def on_stage_committed(fact: e.StageCommitted, run: RunState) -> RunState:
    replica = replica_answered_by(run, fact, "commit")
    if replica is None or fact.step != replica.step:
        return run
    return record_report(run, replica, fact.worker)


@handles
def on_stage_copied(fact: e.StageCopied, run: RunState) -> RunState:
    replica = _save_requested(run, fact)
    if replica is None:
        return run
    part = BackgroundWrite(replica.number, fact.generation, fact.step)
    return record_report(replace(run, writing={**run.writing, fact.worker: part}), replica, fact.worker)


@handles
def on_stage_saved(fact: e.StageSaved, run: RunState) -> RunState:
    if (part := _next_background_write(run, fact)) is not None:
        if run.is_current_write(part):
            run = with_replica(run, _with_saved_stage(run.replicas[part.replica], fact))
        return end_background_write(run, fact.worker)
    replica = _save_requested(run, fact)
    return run if replica is None else record_report(run, _with_saved_stage(replica, fact), fact.worker)


def _with_saved_stage(replica: ReplicaState, fact: e.StageSaved) -> ReplicaState:
    if fact.weights:
        replica = replica.updated(weight_digests={**replica.weight_digests, fact.node: fact.weights})
    if not fact.sha256:
        return replica
    file = fact.file or str(fact.stage)
    if replica.started.lockstep_replicas:
        file = f"{replica_name(replica.arrangement.peers(fact.node).index(fact.node))}/{file}"
    return replica.updated(digests={**replica.digests, file: fact.sha256})


def _save_requested(run: RunState, fact: e.StageCopied | e.StageSaved | e.SaveFailed) -> ReplicaState | None:
    """Return the replica that waits for this worker's part of a checkpoint, even if that save was cancelled (-1)."""
    replica = replica_answered_by(run, fact, "save")
    return replica if replica is not None and replica.saved in (fact.step, -1) else None


def _next_background_write(run: RunState, fact: e.StageSaved | e.SaveFailed) -> BackgroundWrite | None:
    """Return this worker's background write that the event is about, if any."""
    part = run.writing.get(fact.worker)
    return part if part is not None and (part.generation, part.step) == (fact.generation, fact.step) else None


@handles
def on_save_failed(fact: e.SaveFailed, run: RunState) -> RunState:
    if fact.worker == e.CONTROLLER:  # reported before all other events
        return run if run.unsealed is None or run.saved != fact.step else _cancel_save(run.unsealed, fact, "")
    replica, part = _save_requested(run, fact), _next_background_write(run, fact)
    if part is not None:
        now, wanted = end_background_write(run, fact.worker), run.is_current_write(part)
    elif replica is not None:
        now, wanted = record_report(run, replica, fact.worker), run.saving == fact.step == replica.saved
    else:
        return run
    host, before = run.workers[fact.worker].host, run.unsaved
    if wanted:
        now = _cancel_save(now, fact, host)
        if host and before is not None and before.machines == {host}:  # only here, and not for the first time
            now = _fail_joined_machine(now, fact.worker, fact.detail)
    elif before is not None:  # other workers failed in the same save
        now = now.changed(unsaved=replace(before, machines=before.machines | {host}))
    return now


def _cancel_save(run: RunState, fact: e.SaveFailed, host: str) -> RunState:
    """Cancel the current checkpoint; files still being written for it are discarded."""
    for replica in run.replicas.values():
        run = with_replica(run, replica.updated(saved=-1))
    before = run.unsaved
    tries = before.tries if before is not None and before.step == fact.step else 0
    machines = before.machines if before is not None else frozenset()
    return replace(
        give_up_save(run), unsaved=UnsavedCheckpoint(fact.step, fact.detail, tries + 1, machines | {host}, fact.step)
    )


@handles
def on_retry_due(fact: e.RetryDue, run: RunState) -> RunState:
    if run.unsaved is None or run.unsaved.step != fact.step:
        return run
    return run.changed(unsaved=replace(run.unsaved, rested=True))


@handles
def on_update_received_or_update_rejected(fact: e.UpdateReceived | e.UpdateRejected, run: RunState) -> RunState:
    if isinstance(fact, e.UpdateRejected) and not run.exchange.has_rounds:
        return _gradient_rejected(fact, run)
    replica = run.replica_of(fact.worker)
    open_round = None if replica is None or replica.generation != fact.generation else replica.open_round
    if replica is None or open_round is None or open_round.round != fact.round:
        return run
    update = fact.node, fact.replica
    if isinstance(fact, e.UpdateReceived):
        if (
            run.exchange.weighing is not None
            and not {fact.replica, *open_round.products_at(fact.node)} <= fact.products.keys()
        ):
            return run  # its received updates are useless
        open_round = open_round.having_received(fact.node, fact.replica, fact.digest, fact.products)
        replica = replica.updated(open_round=open_round)
        return with_replica(run, replica) if replica.has_received(fact.replica) else with_waiting_replica(run, replica)
    # An update rejected by one member is not used by the others.
    return with_replica(
        run.changed(), replica.updated(open_round=replace(open_round, rejected=open_round.rejected | {update}))
    )


def _gradient_rejected(fact: e.UpdateRejected, run: RunState) -> RunState:
    replica = replica_answered_by(run, fact, "run")
    if replica is None or fact.round != replica.step:
        return run
    column = replica.held.nodes(fact.stage)
    refuses = next((index for index, node in enumerate(column) if replica.holders[node] == fact.worker), None)
    if refuses is None:
        return run
    by = replica.rejected.get(refuses, frozenset()) | {fact.replica}
    return with_waiting_replica(run, replica.updated(rejected={**replica.rejected, refuses: by}))


@handles
def on_round_applied(fact: e.RoundApplied, run: RunState) -> RunState:
    replica = replica_answered_by(run, fact, "settle")
    return run if replica is None else record_report(run, replica, fact.worker)


@handles
def on_round_wait_expired(fact: e.RoundWaitExpired, run: RunState) -> RunState:
    return run.changed(expired_round_waits=run.expired_round_waits | {(fact.replica, fact.round, fact.in_round)})


@handles
def on_worker_failed(fact: e.WorkerFailed, run: RunState) -> RunState:
    failure, worker = f"worker {fact.worker} (stage {fact.stage}): {fact.detail}", run.workers.get(fact.worker)
    if fact.leaves:
        replica = run.replica_of(fact.worker)
        if replica is None or fact.generation != replica.generation:
            return run
        return with_replica(run, replace(replica, last_edge_failure=failure, explained=fact.generation))
    if worker is not None and worker.host:  # a joined machine's error does not end the run; its state is unknown
        return _fail_joined_machine(run, fact.worker, fact.detail, failure)
    return run.changed(failed=run.failed or failure)


def _fail_joined_machine(run: RunState, name: str, detail: str, failure: str = "") -> RunState:
    worker = run.workers[name]
    run = set_machine(run, worker.host, replace(run.machines[worker.host], failure=failure or detail))
    return apply(e.WorkerLost(worker=name, incarnation=worker.incarnation, cause="exit", detail=detail), run)


@handles
def on_stop_requested(fact: e.StopRequested, run: RunState) -> RunState:
    run = run.changed(stopping=fact.reason, stops_before_repair=run.stops_before_repair or fact.skip_repairs)
    for replica in run.live.values() if fact.skip_repairs else ():
        if replica.phase in ("link", "replan") and replica.whole:  # saving needs no edges
            run = with_replica(run, replica.updated(phase="idle", waiting=NO_WORKERS))
    return run


@handles
def on_stop_overdue(fact: e.StopOverdue, run: RunState) -> RunState:
    run = run.changed(overdue=fact.detail)
    for replica in run.live.values():
        if replica.phase in ("idle", "link", "replan", "run", "evaluate"):
            dropped = without_round(replica).updated(phase="idle", waiting=NO_WORKERS, coded=None)
            run = with_replica(run, dropped)
    return run


@handles
def on_interval_chosen(fact: e.IntervalChosen, run: RunState) -> RunState:
    return run.changed(save_every=fact.steps)


@handles
def on_replanned(fact: e.Replanned, run: RunState) -> RunState:
    (replica,) = run.replicas.values()  # only runs of one replica have schedules
    whole = set(fact.nodes) == replica.arrangement.stage.keys()
    replica = replace(replica, candidate_plan=fact) if whole else replace(replica, plan_override=fact)
    return with_replica(run, replace(replica, phase="idle") if replica.phase == "replan" else replica)
