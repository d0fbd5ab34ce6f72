"""New generations of a replica: assignment of workers to nodes, and sources of their states. Pure.

A replica without enough workers is disbanded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planaria.control.checkpoint_decisions import is_being_written
from planaria.control.donors import find_donor_replicas, lost_stages, state_sources
from planaria.control.facts import decisions as d
from planaria.control.facts.events import ReplicaPosition
from planaria.control.facts.members import link
from planaria.control.relays import assign_relays
from planaria.control.spares import assign_spares, fill_vacancies, has_room, more_to_come, no_more_workers
from planaria.control.state.replica import ReplicaState
from planaria.control.state.rollback import RollbackPoint
from planaria.control.state.roster import MAX_FAILED_STARTS
from planaria.control.state.run import RunState
from planaria.recovery.chain import ChainPlan, staleness_by_stage


def form_generation(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Form a new generation: fill vacant nodes from spares, give every node a state, replace broken edges.

    Return None while no relay answers, no donor replica is ready, or a checkpoint that may be needed is being written.
    """
    if run.cut_off:
        return _without_relays(run, replica)
    lost = lost_stages(replica)
    donor_replicas = find_donor_replicas(run, replica, lost)
    if donor_replicas is None:
        return None
    if not donor_replicas and replica.behind:  # the rounds that it missed are lost: it keeps its own weights
        replica = replace(replica, lost=replica.lost - replica.behind.keys(), behind={})
        lost = lost_stages(replica)
    rebuilt_here = lost - donor_replicas.keys()
    staleness = staleness_by_stage(replica.arrangement, replica.stateful, replica.staleness)
    plan = run.started.chain.plan(rebuilt_here, staleness, _stages_with_snapshot(replica))
    if run.exchange.synchronised and (adoption := _adoption(run, replica, donor_replicas, plan)) is not None:
        return adoption
    if (plan.rollback == "disk" or plan.reason) and is_being_written(run):
        return None
    if reason := _why_impossible(run, plan):
        return end_replica(run, replica, reason, sorted(lost))
    holders = fill_vacancies(run, replica)
    short = len(holders) < len(replica.holders) + len(replica.vacant)
    if short and (plan.rollback or not _may_skip(run, replica)):
        return end_if_unstaffed(run, replica)
    if plan.rollback:
        return _roll_back(run, replica, holders, plan, lost)
    return _continue_from(run, replica, holders, donor_replicas, plan)


def _adoption(
    run: RunState, replica: ReplicaState, donor_replicas: Mapping[int, ReplicaState], plan: ChainPlan
) -> d.Adopt | None:
    """Restart the replica as another's copy if its donors are ahead, or if ``plan`` would lose steps; else None."""
    if not replica.stateful.stages:
        return None
    if any(donor.rounds > replica.rounds for donor in donor_replicas.values()):
        return d.Adopt(replica=replica.number, reason="those that have what it lost have settled rounds without it")
    others = [other for number, other in run.live.items() if number != replica.number]
    if (plan.rollback or plan.reason) and any(other.can_be_copied for other in others):
        return d.Adopt(replica=replica.number, reason="no replica that settled as many rounds has the lost state")
    return None


def _why_impossible(run: RunState, plan: ChainPlan) -> str:
    """Return why the replica cannot continue from ``plan``, or an empty string if it can."""
    if plan.rollback and not plan.reason and run.started.start_from_first_worker:
        return "all members with the group's weights are lost"  # other first weights would be another model
    chain = run.started.chain
    if not plan.reason or "checkpoint" in chain.strategies or chain.control_strategy or len(run.live) > 1:
        return plan.reason
    added = f"--recovery.strategy '{run.started.recovery.strategy}, checkpoint'"
    return f"{plan.reason}; to roll back to the newest checkpoint instead, add ', checkpoint': {added}"


def _roll_back(
    run: RunState, replica: ReplicaState, holders: dict[int, str], plan: ChainPlan, lost: frozenset[int]
) -> d.Decision | None:
    """Roll back to the snapshot in memory, or to the newest checkpoint if that is newer."""
    if plan.rollback == "memory" and _is_snapshot_newer(replica, run.durable):
        return _return_to_snapshot(run, replica, holders, plan)
    if not run.durable.sources:
        reason = "its newest checkpoint was only on the controller's machine, which was lost (see checkpoint.store)"
        return end_replica(run, replica, reason, sorted(lost))
    return _return_to_checkpoint(run, replica, holders, run.durable)


def _continue_from(
    run: RunState,
    replica: ReplicaState,
    holders: dict[int, str],
    donor_replicas: Mapping[int, ReplicaState],
    plan: ChainPlan,
) -> d.Decision:
    """Rebuild or copy the lost stages, and continue at the same step."""
    stages = replica.arrangement.stage
    sources = state_sources(replica, holders, donor_replicas, plan.rebuilt)
    outcome: d.Outcome = "skipping" if len(holders) < len(stages) else _outcome(replica)
    position = replica.position
    if donor_replicas.keys() == set(stages.values()):  # it continues as the other's copy
        position = _position_after_orders(donor_replicas[0])
    return _form_or_replan(run, replica, holders, sources, position.model_copy(update={"step": replica.step}), outcome)


def _without_relays(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Wait for the relays; end a replica that has waited too long."""
    if not run.relays_given_up:
        return None
    named = ", ".join(f"{relay} ({error})" for relay, error in sorted(run.unreachable_relays.items()))
    reason = f"no relay has answered for as long as fleet.join_s allows: {named}"
    return end_replica(run, replica, reason, _unheld(replica))


def hand_over_stages(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Hand over the stages of slow or leaving workers unchanged.

    If no worker can take over from a leaving machine, the replica disbands between steps; the last replica stays as
    long as it can.
    """
    leaving = [n for n, w in replica.holders.items() if w in run.roster.leaving] if run.roster.leaving else []
    slow = [n for n, w in replica.holders.items() if run.workers[w].slow] if run.last_handover_at is not None else []
    if not (leaving or slow) or replica.open_round or run.stopping or run.allocation.done:
        return None
    taking = {
        node: spare
        for node, spare in assign_spares(run, replica, [*leaving, *slow]).items()
        if node in leaving or not run.workers[spare].slow
    }
    if taking:
        holders = {**replica.holders, **taking}
        sources: dict[int, d.Source] = {
            node: d.Handover(worker=replica.holders[node]) if node in taking else d.Keep() for node in holders
        }
        return _form_or_replan(run, replica, holders, sources, replica.position, "handed over")
    if not leaving or more_to_come(run) or len(run.live) == 1:
        return None
    return end_replica(run, replica, "the machine of its workers leaves, and there are no others", [])


def _position_after_orders(replica: ReplicaState) -> ReplicaPosition:
    step, inner = replica.step, replica.steps_since_round
    if replica.phase == "commit":
        step, inner = step + 1, inner + 1
    return ReplicaPosition(step=step, rounds=replica.rounds, inner=inner)


def _stages_with_snapshot(replica: ReplicaState) -> frozenset[int]:
    """Return the stages whose first node's worker holds its part of the snapshot in memory."""
    if replica.memory is None or replica.memory.step < 0:
        return frozenset()
    return frozenset(s for s in replica.arrangement.stages if replica.arrangement.nodes(s)[0] in replica.memory.nodes)


def _is_snapshot_newer(replica: ReplicaState, point: RollbackPoint) -> bool:
    assert replica.memory is not None
    saved = point.positions.get(replica.number)
    return saved is None or replica.memory.step >= saved.step


def _return_to_snapshot(run: RunState, replica: ReplicaState, holders: dict[int, str], plan: ChainPlan) -> d.Decision:
    """Roll back to the snapshot in memory, and rebuild its missing parts from the others.

    The first node of a stage restores its part; the other nodes copy it.
    """
    assert replica.memory is not None
    nodes, by, step = replica.arrangement, replica.memory.strategy, replica.memory.step
    first = {stage: nodes.nodes(stage)[0] for stage in nodes.stages}
    sources: dict[int, d.Source] = {}
    for node in holders:
        stage = nodes.stage[node]
        if stage in plan.rebuilt:
            strategy, donors = plan.rebuilt[stage]
            sources[node] = d.Rebuild(by=strategy, donors=[first[s] for s in donors])
        elif node != first[stage]:
            sources[node] = d.Rebuild(by=d.PEER, donors=[first[stage]])
        else:
            # Workers of a run that was just resumed hold nothing yet: their origin names the file to read.
            origin = replica.origins.get(node)
            sources[node] = origin if isinstance(origin, d.Recall) else d.Recall(by=by, step=step)
    return _form_or_replan(run, replica, holders, sources, ReplicaPosition(step=step), "recalled")


def _return_to_checkpoint(
    run: RunState, replica: ReplicaState, holders: dict[int, str], point: RollbackPoint
) -> d.Decision | None:
    position, origins = point.positions.get(replica.number), point.origins(replica.arrangement)
    if position is None:
        return end_replica(run, replica, "it was not there when the last checkpoint was made", [])
    return _form_or_replan(run, replica, holders, {node: origins[node] for node in holders}, position, "rolled back")


def _may_skip(run: RunState, replica: ReplicaState) -> bool:
    """Return whether training may continue without the vacant nodes until workers arrive.

    Training waits while a vacant node's exact state is available, because a skipped stage is lost and never donates; on
    a schedule, it waits only while workers may arrive. A schedule can leave out nodes but no stage.
    """
    settings = run.started
    if settings.recovery.meanwhile != "skip" or replica.formed_at_step < 0:
        return False
    if not replica.lost >= set(replica.vacant) and not (no_more_workers(run) and settings.arrangement):
        return False
    stages = replica.held.stages
    return len(stages) > settings.stages if settings.arrangement else 0 in stages and len(stages) > 1


def _outcome(replica: ReplicaState) -> d.Outcome:
    if replica.formed_at_step < 0:
        return "started"
    return "recovered" if replica.lost or replica.vacant or replica.origins else "relinked"


def _form_or_replan(
    run: RunState,
    replica: ReplicaState,
    holders: dict[int, str],
    sources: dict[int, d.Source],
    position: ReplicaPosition,
    outcome: d.Outcome,
) -> d.Decision:
    """Form these nodes, after planning routes for them if there are none.

    Generations are unique across replicas, so that late reports of an earlier one are recognised.
    """
    routes = replica.routes_over(holders)
    if routes is None:
        return d.Replan(replica=replica.number, nodes=sorted(holders), links=list(replica.slow_links))
    generation, stage = 1 + run.replicas.generation, replica.arrangement.stage
    new = {node for node, worker in holders.items() if replica.holders.get(node) != worker}
    kept = {pair: link_id for pair, link_id in replica.links.items() if not set(pair) & new}
    at = {node: run.workers[worker].at for node, worker in holders.items()}
    pairs = replica.pairs_of(holders)
    relay_of_pair = assign_relays(replica, pairs, kept, routes, run.unreachable_relays)
    return d.Form(
        replica=replica.number,
        generation=generation,
        step=position.step,
        outcome=outcome,
        members=[
            d.Member(node=n, stage=stage[n], worker=holders[n], source=sources[n], at=at[n]) for n in sorted(holders)
        ],
        links=[
            link(kept.get((a, b), f"g{generation}:{a}-{b}"), a, at[a], b, at[b], relay_of_pair.get((a, b), ""))
            for a, b in sorted(pairs)
        ],
        routes=routes if replica.started.arrangement else [],
        rounds=position.rounds,
        inner=position.inner,
    )


def end_if_unstaffed(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """End the replica if a node lacks a worker and none will come."""
    if more_to_come(run):
        return None
    if run.join_timed_out:
        workers = "1 worker is" if len(replica.vacant) == 1 else f"{len(replica.vacant)} workers are"
        reason = f"{workers} missing, and no machine has joined in time (fleet.join_s)"
    elif run.failed_starts >= MAX_FAILED_STARTS:
        reason = f"{run.failed_starts} workers in a row died before they were ready"
    else:
        where = "node" if run.started.arrangement or run.started.max_replicas > 1 else "stage"
        of, spares = replica.arrangement.stage, run.spares
        nodes = [node for node in replica.vacant if not any(has_room(run, worker, of[node]) for worker in spares)]
        named = ", ".join(map(str, nodes or replica.vacant))
        why = "fleet.replace = false starts no other" if no_more_workers(run) else "there is no room for another"
        lacking = "spare's device has room" if spares else "worker is left"
        reason = f"no {lacking} for {where} {named}; {why}"
    return end_replica(run, replica, reason, _unheld(replica))


def end_overdue_wait(run: RunState, replica: ReplicaState) -> d.Decision:
    """End the wait of a stopped run for a replica's missing stages: save the others, if any."""
    reason = f"stopped by {run.stopping} before its lost stages were replaced: {run.overdue}"
    if len(run.live) == 1 and replica.formed_at_step < 0:
        return d.Finish(outcome="cannot", reason=reason)
    return end_replica(run, replica, reason, replica.missing_stages)


def _unheld(replica: ReplicaState) -> list[int]:
    return sorted(set(replica.arrangement.stages) - set(replica.held.stages))


def end_replica(run: RunState, replica: ReplicaState, reason: str, lost: list[int]) -> d.Decision:
    """End a replica that cannot continue. Others continue without it; the last one saves the remaining stages."""
    if len(run.live) > 1:
        others = [other for number, other in run.live.items() if number != replica.number]
        stateless = all(other.is_stateless and not other.behind for other in others)
        first = others[0] if stateless else replica  # replicas without state go first
        return d.Disband(replica=first.number, workers=sorted(first.holders.values()), reason=reason)
    if replica.formed_at_step < 0:
        return d.Finish(outcome="failed", reason=reason)
    return d.Unrecoverable(replica=replica.number, lost=lost, reason=reason)
