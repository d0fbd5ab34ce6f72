"""Handlers of ``apply`` for decisions and diagnoses; new generations are in ``control/apply_membership.py``. Pure."""

from __future__ import annotations

from dataclasses import replace

from planaria.control.apply_base import (
    give_up_save,
    handles,
    reconsider,
    set_machine,
    set_workers,
    with_replica,
    without_round,
)
from planaria.control.apply_membership import invalidate_states
from planaria.control.facts import decisions as d
from planaria.control.state.replica import NO_WORKERS, OpenRound, WorkerSet, after_commit
from planaria.control.state.rollback import RollbackPoint
from planaria.control.state.roster import MachineState, WorkerState
from planaria.control.state.run import RunState
from planaria.exchange.coded.coded_apply import first_round


@handles
def on_replan(fact: d.Replan, run: RunState) -> RunState:
    requested = replace(run.replicas[fact.replica], phase="replan", waiting=NO_WORKERS, slow_links=tuple(fact.links))
    return with_replica(run, requested)


@handles
def on_reroute(fact: d.Reroute, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    return with_replica(run, replace(replica, plan_override=replica.candidate_plan, candidate_plan=None))


@handles
def on_spawn(fact: d.Spawn, run: RunState) -> RunState:
    return set_workers(run, {fact.worker: WorkerState(fact.incarnation, "starting", host=fact.host)})


@handles
def on_release(fact: d.Release, run: RunState) -> RunState:
    return set_workers(run, {fact.worker: replace(run.workers[fact.worker], status="released")})


@handles
def on_remove_machine(fact: d.RemoveMachine, run: RunState) -> RunState:
    return set_machine(run, fact.host, MachineState(workers=0))


@handles
def on_run_step(fact: d.RunStep, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    if fact.mode == "train":
        run = run.updated(allocation=run.allocation.take(fact.replica, fact.block))
        if replica.memory is not None:
            replica = replica.updated(memory=replica.memory.begin(fact.step))
    phase = "run" if fact.mode == "train" else "evaluate"
    coded = first_round(run) if fact.mode == "train" else None
    changes = {"phase": phase, "coded": coded, "waiting": WorkerSet(replica.holders.values())}
    return with_replica(run, replica.updated(**changes, received={}, rejected={}))


@handles
def on_leave_out(fact: d.LeaveOut, run: RunState) -> RunState:
    findings = [*((byzantine_member,) for byzantine_member in fact.byzantine), *fact.disputes]
    run = replace(run, suspicion=run.suspicion.with_findings(findings))
    return with_replica(run, run.replicas[fact.replica].updated(phase="idle"))


@handles
def on_commit(fact: d.Commit, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    if replica.origins:  # of vacant nodes: their initial state is obsolete
        replica = replace(replica, lost=replica.lost | replica.origins.keys(), origins={})
    copies = replica.started.pairs_of(replica.number)
    staleness, missed_steps = after_commit(replica.staleness, replica.missed_steps, replica.skipped, copies)
    waiting = WorkerSet(replica.holders.values())
    changes = {
        "phase": "commit",
        "waiting": waiting,
        "staleness": dict(staleness),
        "missed_steps": missed_steps,
        "last_edge_failure": "",
        "rejections": frozenset(),
    }
    if fact.next_block is not None:
        run = run.updated(allocation=run.allocation.reserve(fact.replica, fact.next_block))
    return with_replica(run, replica.updated(**changes))


@handles
def on_begin_round(fact: d.BeginRound, run: RunState) -> RunState:
    exchange = run.exchange
    for number in fact.members:
        replica = run.replicas[number]
        ordered = int(replica.phase == "commit")  # a step that its workers commit before they begin the round
        step = replica.step + ordered
        inner = max(0, step - replica.received_at(fact.round - exchange.cycle)) if exchange.decoupled else 0
        settle_at = step + exchange.overlap
        open_round = OpenRound(fact.round, tuple(fact.members), settle_at, inner=inner)
        begun = replica.updated(open_round=open_round, rounds=fact.round + 1, steps_since_round=-ordered)
        run = with_replica(run, begun)
    # Some may have been in this round before and timed out.
    over = {(number, fact.round) for number in fact.members}
    return replace(run, expired_round_waits=frozenset(key for key in run.expired_round_waits if key[:2] not in over))


@handles
def on_settle(fact: d.Settle, run: RunState) -> RunState:
    open_rounds = {
        number: open_round for number in fact.members if (open_round := run.replicas[number].open_round) is not None
    }
    rejected = {number: {sender for _, sender in m.rejected} | {*fact.byzantine} for number, m in open_rounds.items()}
    run = replace(
        run, suspicion=run.suspicion.end_round(fact.round, {n: of for n, of in rejected.items() if of}, run.exchange)
    )
    participants = {n for open_round in open_rounds.values() for n in open_round.members}
    # Remaining members may continue, possibly alone.
    run = reconsider(run, [run.replicas[number] for number in participants])
    for number in fact.members:
        replica = run.replicas[number]
        inner = replica.steps_since_round if replica.open_round else 0
        settling = replica.updated(phase="settle", waiting=WorkerSet(replica.holders.values()), open_round=None)
        run = with_replica(run, settling.updated(rounds=fact.round + 1, steps_since_round=inner))
    return _forget_rounds(_settle_decoupled(run, fact) if run.exchange.decoupled else run)


def _settle_decoupled(run: RunState, fact: d.Settle) -> RunState:
    """Record when members received the round's weights, and what the others of the round will settle with."""
    weights = next(iter(fact.counted.values()), {})
    for number in fact.members:
        replica = run.replicas[number]
        recent = {r: replica.received_at(r) for r in range(fact.round - run.exchange.cycle + 1, fact.round)}
        run = with_replica(run, replica.updated(settled_at={**recent, fact.round: replica.step}))
    for replica in run.live.values():
        if replica.open_round is not None and replica.open_round.round == fact.round:
            open_round = replace(replica.open_round, contributors=weights)
            run = with_replica(run, replica.updated(open_round=open_round))
    return run


def _forget_rounds(run: RunState) -> RunState:
    behind = min(replica.rounds for replica in run.live.values())
    open_round = [replica.open_round.round for replica in run.live.values() if replica.open_round]
    first = min([behind, *open_round])
    groups = {number: groups for number, groups in run.groups.items() if number >= first}
    introduced = {number: links for number, links in run.edges_with_open_prefetch.items() if number >= first}
    late = frozenset(key for key in run.expired_round_waits if key[1] >= first)
    return replace(run, groups=groups, edges_with_open_prefetch=introduced, expired_round_waits=late)


@handles
def on_draw_groups(fact: d.DrawGroups, run: RunState) -> RunState:
    return run.changed(groups={**run.groups, fact.round: tuple(map(tuple, fact.groups))})


@handles
def on_open_prefetch_links(fact: d.OpenPrefetchLinks, run: RunState) -> RunState:
    opened = run.edges_with_open_prefetch.get(fact.round, frozenset()) | {link.id for link in fact.links}
    return replace(run, edges_with_open_prefetch={**run.edges_with_open_prefetch, fact.round: opened})


@handles
def on_adopt(fact: d.Adopt, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    behind = {node: replica.holders[node] for node in replica.stateful.stage} if run.exchange.decoupled else {}
    return with_replica(run, replace(invalidate_states(replica), behind=behind))


@handles
def on_save(fact: d.Save, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    stateful = replica.stateful
    all_keep = fact.whole or fact.compared or run.started.lockstep_replicas
    nodes = stateful.stage if all_keep else stateful.firsts
    keepers = {replica.holders[node] for node in nodes}
    if run.saving < 0:  # an earlier checkpoint may have had the same name
        for other in run.replicas.values():
            run = with_replica(run, other.updated(saved=-1))
    position = without_round(replica).position  # saved states do not know the current round
    positions = {**run.positions, fact.replica: position}
    run = run.changed(saving=fact.step, allocation=run.allocation.save(fact.replica), positions=positions)
    saved = replica.updated(phase="save", waiting=WorkerSet(keepers), saved=fact.step, saved_generation=fact.generation)
    return with_replica(run, saved.updated(digests={}, weight_digests={}))


@handles
def on_seal(fact: d.Seal, run: RunState) -> RunState:
    before = replace(run, unsealed=None)
    if fact.partial:
        allocation = run.allocation.give_up_save()
        return run.changed(saving=-1, saved=fact.step, allocation=allocation, unsaved=None, unsealed=before)
    stages = range(run.started.stages + 1)
    return run.changed(
        saving=-1,
        saved=fact.step,
        unsaved=None,
        unsealed=before,
        durable=RollbackPoint(dict.fromkeys(stages, d.Load(folder=fact.folder)), run.positions, fact.step),
        positions={},
        allocation=run.allocation.seal(),
    )


@handles
def on_discard(fact: d.Discard, run: RunState) -> RunState:
    return run.changed(unsaved=run.unsaved and replace(run.unsaved, discarded=True))


@handles
def on_unrecoverable(fact: d.Unrecoverable, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    run = give_up_save(replace(run, saved=-1))
    return with_replica(
        run, replace(replica, unrecoverable_reason=fact.reason, phase="idle", waiting=NO_WORKERS, saved=-1)
    )


@handles
def on_disband(fact: d.Disband, run: RunState) -> RunState:
    """End a replica; a step that it was committing counts, since its commit is in the log."""
    replica = run.replicas[fact.replica]
    run = set_workers(run, {w: replace(run.workers[w], status="spare") for w in replica.holders.values()})
    disbanded = replace(
        replica,
        phase="left",
        step=replica.step + (replica.phase == "commit"),
        holders={},
        waiting=NO_WORKERS,
        open_round=None,
        links={},
        lost=frozenset(replica.arrangement.stage),
        handover_from={},
        origins={},
    )
    positions = {number: position for number, position in run.positions.items() if number != fact.replica}
    run = with_replica(run, disbanded)
    return run.changed(allocation=run.allocation.remove_replica(fact.replica), positions=positions)


@handles
def on_exclude_member(fact: d.ExcludeMember, run: RunState) -> RunState:
    """Release workers: they get no more orders, and count as lost when they exit.

    This includes all workers of their machines, if those have joined.
    """
    workers = run.workers
    for host in sorted({workers[worker].host for worker in fact.workers} - {""}):
        run = set_machine(run, host, replace(run.machines[host], failure=fact.reason))
    run = set_workers(run, {worker: replace(workers[worker], status="released") for worker in fact.workers})
    if not fact.accuser:
        return replace(run, suspicion=run.suspicion.without_reports_about(fact.member))
    replica = replace(run.replicas[fact.member], rejections=frozenset())
    return replace(with_replica(run, replica), accusers=run.accusers ^ {run.machine_or_worker(fact.accuser)})


@handles
def on_replica_restarted(fact: d.ReplicaRestarted, run: RunState) -> RunState:
    replica = run.replicas[fact.replica]
    return with_replica(
        run.changed(), replace(replica, phase="idle", attempts=0, rejections=frozenset(), saved=-1, skipped=frozenset())
    )


@handles
def on_finish(fact: d.Finish, run: RunState) -> RunState:
    run = replace(run, over=True)
    for replica in run.replicas.values():
        run = with_replica(run, replica.updated(waiting=NO_WORKERS))
    return run


@handles
def on_slow_part_found(fact: d.SlowPartFound, run: RunState) -> RunState:
    return replace(run, blamed={**run.blamed, (fact.fault, tuple(fact.nodes)): fact})


@handles
def on_cleared(fact: d.Cleared, run: RunState) -> RunState:
    still_blamed = {key: blamed for key, blamed in run.blamed.items() if key != (fact.fault, tuple(fact.nodes))}
    return replace(run, blamed=still_blamed)


@handles
def on_hand_over_slow_stage(fact: d.HandOverSlowStage, run: RunState) -> RunState:
    slow = replace(run.workers[fact.worker], slow=True)
    return set_workers(replace(run, last_handover_at=run.gauges.clock), {fact.worker: slow})
