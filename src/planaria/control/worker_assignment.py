"""Workers: where to start or release them, which spare takes over a node, and which replica sends a stage.

All functions are pure. The run's own machines have room for the workers of its first replicas and for spares. Joined
machines have room of their own, which is used immediately. A dead worker is replaced on its own machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set

from planaria.control.facts import decisions as d
from planaria.control.state.replica import ReplicaState
from planaria.control.state.roster import MAX_FAILED_STARTS
from planaria.control.state.run import RunState
from planaria.recovery.chain import Chain


def find_donor_replicas(run: RunState, replica: ReplicaState, lost: Set[int]) -> dict[int, ReplicaState] | None:
    """Return stage → replica that sends it, if any has the ``lost`` stages, or None while none is ready.

    A complete replica sends all; each attempt uses the next one. If every replica lost stages, they send each other's.
    A replica without any stage waits for a complete one to copy.
    """
    synchronised = run.exchange.synchronised
    lost_all_stages = lost == set(replica.arrangement.stages)
    others = [r for n, r in run.live.items() if n != replica.number and not r.is_stateless]
    if synchronised:
        furthest = max((settled_rounds(r) for r in others), default=0) if lost_all_stages else replica.rounds
        others = [r for r in others if settled_rounds(r) >= furthest]
    ready = [r for r in others if r.phase != "link" and not r.origins and not (synchronised and r.open_round)]
    rotation = replica.number + replica.attempts
    if whole := [r for r in ready if not r.broken]:
        return dict.fromkeys(sorted(lost), whole[rotation % len(whole)])
    if lost_all_stages:
        return None if others else {}
    if not all(any(_will_have(r, stage, synchronised) for r in others) for stage in lost):
        return {}
    ready = [r for r in ready if not synchronised or r.rounds == replica.rounds]
    holders_of = {stage: [r for r in ready if stage in r.stateful.stages] for stage in sorted(lost)}
    if any(r.phase == "link" for r in others) or not all(holders_of.values()):
        return None
    return {stage: holders[rotation % len(holders)] for stage, holders in holders_of.items()}


def settled_rounds(replica: ReplicaState) -> int:
    """Return the rounds of the exchange that its state includes."""
    return replica.open_round.round if replica.open_round else replica.rounds


def can_be_copied(replica: ReplicaState) -> bool:
    """Return whether the replica is complete and in no round."""
    return not (replica.broken or replica.open_round or replica.origins or replica.phase == "link")


def _will_have(replica: ReplicaState, stage: int, synchronised: bool) -> bool:
    """Return whether the stage will soon be available. If two synchronised replicas lost it, only one rebuilds it."""
    kept = set(replica.arrangement.nodes(stage)) - (replica.lost - replica.handover_from.keys())
    return bool(kept) or (synchronised and replica.phase == "link")


def fill_vacancies(run: RunState, replica: ReplicaState) -> dict[int, str]:
    """Return spares for vacant nodes; if there are too few, the leaving worker of a node keeps it."""
    vacant = sorted(replica.vacant, key=lambda node: node in replica.handover_from)
    kept = {node: worker for node, worker in replica.handover_from.items() if node in vacant}
    return {**replica.holders, **kept, **assign_spares(run, replica, vacant)}


def assign_spares(run: RunState, replica: ReplicaState, nodes: Iterable[int]) -> dict[int, str]:
    """Return spares for these nodes, for the first ones if there are too few."""
    spares = spares_by_preference(run, replica)
    stage_of, work = replica.arrangement.stage, run.settings.stage_work
    if not work:
        return dict(zip(nodes, spares, strict=False))
    taken: dict[int, str] = {}
    spares.sort(key=lambda worker: run.workers[worker].layer_s)
    for node in sorted([*nodes][: len(spares)], key=lambda node: -work[stage_of[node]]):
        spare = next((worker for worker in spares if has_room(run, worker, stage_of[node])), None)
        if spare is not None:
            taken[node] = spare
            spares.remove(spare)
    return taken


def has_room(run: RunState, worker: str, stage: int) -> bool:
    """Return whether a worker's device can hold a stage, if known."""
    needed, memory = run.settings.memory_needs, run.workers[worker].memory
    return not needed or not memory or needed[stage] <= memory


def spares_by_preference(run: RunState, replica: ReplicaState) -> list[str]:
    """Return the spares for a replica: those of the run's own machines first; last if the replica was formed from
    joined machines.

    Workers that were slow, or are on slow machines, come last.
    """
    later, workers = replica.number >= run.settings.replicas, run.workers
    return sorted(run.spares, key=lambda worker: (is_slow(run, worker), bool(workers[worker].host) != later))


def is_slow(run: RunState, worker: str) -> bool:
    """Return whether a worker handed over its stage because it was slow, or its machine is slow."""
    machines = {
        run.workers[slow_worker].host
        for (fault, _), blamed in run.blamed.items()
        if fault == "slow host"
        for slow_worker in blamed.workers
    }
    return run.workers[worker].slow or run.workers[worker].host in machines


def count_suitable_spares(run: RunState) -> int:
    """Return the number of spares that can take over any node that lacks a worker."""
    if not run.settings.memory_needs:
        return len(run.spares)
    stages = {r.arrangement.stage[node] for r in run.live.values() for node in r.vacant}
    return sum(all(has_room(run, worker, stage) for stage in stages) for worker in run.spares)


def spawn_if_needed(run: RunState) -> d.Spawn | None:
    """Start a worker if a node lacks one; also if a spare is missing, but only while the run makes steps, since a
    start costs CPU time.

    Spares are optional: if they die before they are ready, the run continues without them.
    """
    if run.stops_before_repair and (run.overdue or all(replica.whole for replica in run.live.values())):
        return None
    joined = run.roster.with_room(run.settings.replace)
    if not (joined or _has_room(run)) or any(replica.unrecoverable_reason for replica in run.troubled):
        return None
    ending = run.stopping or run.allotment.done
    if joined and not (ending and missing_workers(run) <= 0):
        return _start(run, joined[0])
    if not _has_room(run):
        return None
    if not any(r.phase == "run" or (r.phase == "idle" and r.vacant) for r in run.live.values()):
        return None
    moving = all(replica.formed_at_step < 0 or replica.step > replica.formed_at_step for replica in run.live.values())
    wanted = run.settings.spares if moving else 0
    return _start(run, "") if missing_workers(run) + wanted > 0 else None


def missing_workers(run: RunState) -> int:
    """Return the number of nodes that need another worker with none present or starting.

    Workers that start on joined machines do not count, since that may take long.
    """
    at_home = [worker for worker in run.roster.starting if not run.workers[worker].host]
    return run.vacancies + count_leaving_nodes(run) - count_suitable_spares(run) - len(at_home)


def count_leaving_nodes(run: RunState) -> int:
    """Return the number of nodes whose worker is leaving."""
    return sum(worker in run.replicas.replica_of_worker for worker in run.roster.leaving)


def no_more_workers(run: RunState) -> bool:
    """Return whether no workers can join besides those of the run's own machines."""
    return not run.settings.replace and all(replica.formed_at_step >= 0 for replica in run.live.values())


def more_to_come(run: RunState) -> bool:
    """Return whether a worker is starting or may be started; not after too many died before they were ready."""
    may_start = run.failed_starts < MAX_FAILED_STARTS
    starting = any(may_start or run.workers[worker].host for worker in run.roster.starting)
    return starting or _has_room(run) or bool(run.roster.with_room(run.settings.replace)) or _awaits_machines(run)


def workers_to_join(run: RunState) -> int:
    """Return the number of workers without which the run pauses until another machine joins; 0 if it does not."""
    if not _awaits_machines(run) or run.stopping or run.allotment.done:
        return 0
    available = count_suitable_spares(run) + len(run.roster.starting)
    return 0 if run.roster.with_room(run.settings.replace) else max(0, run.vacancies - available)


def _awaits_machines(run: RunState) -> bool:
    """Return whether the run depends on joining machines, and one joined recently or still may."""
    settled_for_less = no_more_workers(run) and len(run.live) > 1
    return run.settings.own_workers < run.settings.all_workers and not (run.join_timed_out or settled_for_less)


def _has_room(run: RunState) -> bool:
    """Return whether another worker may be started on the run's own machines."""
    own_workers = run.roster.staying_on("")
    return own_workers < run.settings.own_workers and run.failed_starts < MAX_FAILED_STARTS and not no_more_workers(run)


def _start(run: RunState, host: str) -> d.Spawn:
    dead = [worker for worker in run.with_status("dead") if run.workers[worker].host == host]
    if dead and (run.settings.replace or not host):
        return d.Spawn(worker=dead[0], incarnation=run.workers[dead[0]].incarnation + 1, host=host)
    return d.Spawn(worker=f"w{len(run.workers)}", incarnation=1, host=host)


def release_leaving(run: RunState) -> d.Release | d.RemoveMachine | None:
    """Release leaving workers that hold nothing, and dismiss machines whose workers fail."""
    for host in run.roster.rejected:
        return d.RemoveMachine(host=host, reason=run.machines[host].rejection)
    done = [worker for worker in run.with_status("spare") if worker in run.roster.leaving] if run.roster.leaving else []
    needed = workers_sending_state(run) if done else set()
    return next((d.Release(worker=worker) for worker in done if worker not in needed), None)


def workers_sending_state(run: RunState) -> set[str]:
    """Return the workers that still have a state to hand over or to write."""
    leavers = {worker for replica in run.live.values() for worker in replica.handover_from.values()}
    donors = {w for replica in run.live.values() if replica.phase == "link" for w in replica.donor_workers.values()}
    return leavers | donors | run.writing.keys()


def restart_replica(run: RunState) -> d.ReplicaRestarted | None:
    """Start or restart an absent replica as a copy of another, once there are enough workers."""
    lost = run.replicas.left
    if not lost or run.allotment.done or run.stopping:
        return None
    if len(run.spares) - run.vacancies - count_leaving_nodes(run) <= run.settings.stages:
        return None
    whole = any(can_be_copied(replica) for replica in run.live.values())
    return d.ReplicaRestarted(replica=min(lost)) if whole else None


COMPLETE_COPY_AGE = 1 << 30
"""commits after which every copy is complete"""


def machine_loss_costs(run: RunState) -> dict[str, str]:
    """Return joined machine → cost of its loss, given the stages that others could rebuild.

    Excludes the run's own machine, whose loss ends the run.
    """
    chain = run.settings.chain
    held: defaultdict[str, set[int]] = defaultdict(set)
    for replica in run.live.values():
        for node, worker in replica.holders.items():
            held[run.workers[worker].host].add(replica.arrangement.stage[node])
    costs = {}
    for host in sorted(held.keys() - {""}):
        elsewhere = {stage for other, stages in held.items() if other != host for stage in stages}
        lost = frozenset(held[host] - elsewhere)
        alone = [_cost(chain, frozenset({stage})) for stage in lost]
        if len(lost) > 1 and not any(alone) and (cost := _cost(chain, lost)):
            costs[host] = f"machine {host} holds stages {', '.join(map(str, sorted(lost)))}; if it is lost, {cost}"
    return costs


def _cost(chain: Chain, lost: frozenset[int]) -> str:
    """Return the harm of losing these stages together, besides time; empty: none."""
    plan = chain.plan(lost, dict.fromkeys(range(chain.stages + 1), COMPLETE_COPY_AGE))
    if plan.reason:
        return f"the run cannot continue ({plan.reason})"
    return "all stages roll back to the newest checkpoint" if plan.rollback == "disk" else ""
