"""Spares: which one takes over a node, and when workers are started or released. Pure.

The run's own machines have room for the workers of its first replicas and for spares. Joined
machines have room of their own, which is used immediately. A dead worker is replaced on its own machine.
"""

from __future__ import annotations

from collections.abc import Iterable

from planaria.control.facts import decisions as d
from planaria.control.state.replica import ReplicaState
from planaria.control.state.roster import MAX_FAILED_STARTS
from planaria.control.state.run import RunState


def fill_vacancies(run: RunState, replica: ReplicaState) -> dict[int, str]:
    """Return spares for vacant nodes; if there are too few, the leaving worker of a node keeps it."""
    vacant = sorted(replica.vacant, key=lambda node: node in replica.handover_from)
    kept = {node: worker for node, worker in replica.handover_from.items() if node in vacant}
    return {**replica.holders, **kept, **assign_spares(run, replica, vacant)}


def assign_spares(run: RunState, replica: ReplicaState, nodes: Iterable[int]) -> dict[int, str]:
    """Return spares for these nodes, for the first ones if there are too few."""
    spares = spares_by_preference(run, replica)
    stage_of, work = replica.arrangement.stage, run.started.stage_work
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
    needed, memory = run.started.memory_needs, run.workers[worker].memory
    return not needed or not memory or needed[stage] <= memory


def spares_by_preference(run: RunState, replica: ReplicaState) -> list[str]:
    """Return the spares for a replica: those of the run's own machines first; last if the replica was formed from
    joined machines.

    Workers that were slow, or are on slow machines, come last.
    """
    later, workers = replica.number >= run.started.replicas, run.workers
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
    if not run.started.memory_needs:
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
    joined = run.roster.with_room(run.started.replace)
    if not (joined or _has_room(run)) or any(replica.unrecoverable_reason for replica in run.troubled):
        return None
    ending = run.stopping or run.allocation.done
    if joined and not (ending and missing_workers(run) <= 0):
        return _start(run, joined[0])
    if not _has_room(run):
        return None
    if not any(r.phase == "run" or (r.phase == "idle" and r.vacant) for r in run.live.values()):
        return None
    moving = all(replica.formed_at_step < 0 or replica.step > replica.formed_at_step for replica in run.live.values())
    wanted = run.started.spares if moving else 0
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
    return not run.started.replace and all(replica.formed_at_step >= 0 for replica in run.live.values())


def more_to_come(run: RunState) -> bool:
    """Return whether a worker is starting or may be started; not after too many died before they were ready."""
    may_start = run.failed_starts < MAX_FAILED_STARTS
    starting = any(may_start or run.workers[worker].host for worker in run.roster.starting)
    return starting or _has_room(run) or bool(run.roster.with_room(run.started.replace)) or _awaits_machines(run)


def workers_to_join(run: RunState) -> int:
    """Return the number of workers without which the run pauses until another machine joins; 0 if it does not."""
    if not _awaits_machines(run) or run.stopping or run.allocation.done:
        return 0
    available = count_suitable_spares(run) + len(run.roster.starting)
    return 0 if run.roster.with_room(run.started.replace) else max(0, run.vacancies - available)


def _awaits_machines(run: RunState) -> bool:
    """Return whether the run depends on joining machines, and one joined recently or still may."""
    settled_for_less = no_more_workers(run) and len(run.live) > 1
    return run.started.own_workers < run.started.all_workers and not (run.join_timed_out or settled_for_less)


def _has_room(run: RunState) -> bool:
    own_workers = run.roster.staying_on("")
    return own_workers < run.started.own_workers and run.failed_starts < MAX_FAILED_STARTS and not no_more_workers(run)


def _start(run: RunState, host: str) -> d.Spawn:
    dead = [worker for worker in run.with_status("dead") if run.workers[worker].host == host]
    if dead and (run.started.replace or not host):
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
    if not lost or run.allocation.done or run.stopping:
        return None
    if len(run.spares) - run.vacancies - count_leaving_nodes(run) <= run.started.stages:
        return None
    whole = any(replica.can_be_copied for replica in run.live.values())
    return d.ReplicaRestarted(replica=min(lost)) if whole else None
