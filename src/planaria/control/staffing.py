"""Workers: how many are started and where, who is let go, and when a replica may begin. Pure.

The run's own machines have room for its crew: the workers of the replicas that it begins with, and spares. Machines
that join have room of their own, which is used at once; whoever dies is born again where it was.
"""

from __future__ import annotations

from planaria.control.lending import can_be_copied
from planaria.control.spares import fit_spares
from planaria.record import decisions as d
from planaria.record.roster import MAX_STILLBORN
from planaria.record.state import RunState


def staff(run: RunState) -> d.Spawn | None:
    """Start a worker if nodes lack one, or if spares do and the run moves: starting one costs the others CPU time.

    Spares are a convenience: where they die before they are ready, the run goes on without.
    """
    if run.prompt and (run.overdue or all(replica.whole for replica in run.live.values())):
        return None
    joined = run.roster.with_room(run.settings.replace)
    if not (joined or _has_room(run)) or any(replica.cannot for replica in run.troubled):
        return None
    ending = run.stopping or run.allotment.done
    if joined and not (ending and needed(run) <= 0):
        return _start(run, joined[0])
    if not _has_room(run):
        return None
    if not any(r.phase == "run" or (r.phase == "idle" and r.vacant) for r in run.live.values()):
        return None
    moving = all(replica.formed < 0 or replica.step > replica.formed for replica in run.live.values())
    wanted = run.settings.spares if moving else 0
    return _start(run, "") if needed(run) + wanted > 0 else None


def needed(run: RunState) -> int:
    """Nodes that need another worker, and for which none is there or about to be.

    Those that are being born on machines that have joined are not waited for: that may take long.
    """
    at_home = [worker for worker in run.roster.starting if not run.workers[worker].host]
    return run.vacancies + leaving(run) - fit_spares(run) - len(at_home)


def leaving(run: RunState) -> int:
    """Nodes whose worker is to leave."""
    return sum(worker in run.replicas.standing for worker in run.roster.leaving)


def final(run: RunState) -> bool:
    """Are the workers of the run's own machines all that there will be?"""
    return not run.settings.replace and all(replica.formed >= 0 for replica in run.live.values())


def more_to_come(run: RunState) -> bool:
    """Is a worker on its way, or may one be started? Not where so many have died before they were ready."""
    hopeful, roster = run.stillborn < MAX_STILLBORN, run.roster
    coming = any(hopeful or run.workers[worker].host for worker in roster.starting)
    return coming or _has_room(run) or bool(roster.with_room(run.settings.replace)) or _awaits_machines(run)


def lacking(run: RunState) -> int:
    """Workers without whom the run stands still until another machine joins; 0 where none are, or none will."""
    if not _awaits_machines(run) or run.stopping or run.allotment.done:
        return 0
    there = fit_spares(run) + len(run.roster.starting)
    return 0 if run.roster.with_room(run.settings.replace) else max(0, run.vacancies - there)


def _awaits_machines(run: RunState) -> bool:
    """Is the run to be carried on by machines that join, and have any joined lately, or may yet?"""
    return run.settings.own_workers < run.settings.all_workers and not run.deserted


def _has_room(run: RunState) -> bool:
    """May another worker be started on the run's own machines?"""
    there = run.roster.staying_on("")
    return there < run.settings.own_workers and run.stillborn < MAX_STILLBORN and not final(run)


def _start(run: RunState, host: str) -> d.Spawn:
    dead = [worker for worker in run.with_status("dead") if run.workers[worker].host == host]
    if dead and (run.settings.replace or not host):
        return d.Spawn(worker=dead[0], incarnation=run.workers[dead[0]].incarnation + 1, host=host)
    return d.Spawn(worker=f"w{len(run.workers)}", incarnation=1, host=host)


def let_go(run: RunState) -> d.Release | d.TurnAway | None:
    """Workers that were to leave and have nothing any more exit; machines that ruin their workers are sent away."""
    for host in run.roster.unfit:
        return d.TurnAway(host=host, reason=run.hosts[host].unfit)
    done = [worker for worker in run.with_status("spare") if worker in run.roster.leaving] if run.roster.leaving else []
    needed = giving(run) if done else set()
    return next((d.Release(worker=worker) for worker in done if worker not in needed), None)


def giving(run: RunState) -> set[str]:
    """Workers that have something to hand over yet, to others or to a disk."""
    handing = {worker for replica in run.live.values() for worker in replica.leavers.values()}
    lending = {w for replica in run.live.values() if replica.phase == "link" for w in replica.lenders.values()}
    return handing | lending | run.writing.keys()


def reopen(run: RunState) -> d.Found | None:
    """A replica that is not there begins, or begins anew, as a copy of another, once there are enough workers."""
    gone = run.replicas.gone
    if not gone or run.allotment.done or run.stopping:
        return None
    if len(run.spares) - run.vacancies - leaving(run) <= run.settings.stages:
        return None
    whole = any(can_be_copied(replica) for replica in run.live.values())
    return d.Found(replica=min(gone)) if whole else None
