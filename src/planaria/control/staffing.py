"""Workers: how many are started and where, who is let go, and when a replica may begin. Pure.

The run's own machines have room for its crew: the workers of the replicas that it begins with, and spares. Machines
that join have room of their own, which is used at once; whoever dies is born again where it was.
"""

from __future__ import annotations

from planaria.control.lending import can_be_copied
from planaria.record import decisions as d
from planaria.record.state import RunState

MAX_STILLBORN = 3


def staff(run: RunState) -> d.Spawn | None:
    """Start a worker if nodes lack one, or if spares do and the run moves: starting one costs the others CPU time.

    Spares are a convenience: where they die before they are ready, the run goes on without.
    """
    if any(replica.cannot for replica in run.live.values()):
        return None
    ending = run.stopping or run.allotment.done
    for host in run.hosts:
        if _room_at(run, host) and not (ending and needed(run) <= 0):
            return _start(run, host)
    hiring = any(r.phase == "run" or (r.phase == "idle" and r.vacant) for r in run.live.values())
    if not hiring or not _room_at(run, ""):
        return None
    moving = all(replica.formed < 0 or replica.step > replica.formed for replica in run.live.values())
    wanted = run.settings.spares if moving else 0
    return _start(run, "") if needed(run) + wanted > 0 else None


def needed(run: RunState) -> int:
    """Nodes that need another worker, and for which none is there or about to be.

    Those that are being born on machines that have joined are not waited for: that may take long.
    """
    at_home = [worker for worker in _starting(run) if not run.workers[worker].host]
    return run.vacancies + _leaving(run) - len(run.spares) - len(at_home)


def _leaving(run: RunState) -> int:
    """Nodes whose worker is to leave."""
    return sum(run.workers[worker].leaving for worker in run.holders.values())


def _starting(run: RunState) -> list[str]:
    return [worker for worker in run.with_status("starting") if run.stays(worker)]


def final(run: RunState) -> bool:
    """Are the workers of the run's own machines all that there will be?"""
    return not run.settings.replace and all(replica.formed >= 0 for replica in run.live.values())


def more_to_come(run: RunState) -> bool:
    """Is a worker on its way, or may one be started? Not where so many have died before they were ready."""
    hopeful = run.stillborn < MAX_STILLBORN
    return any(hopeful or run.workers[worker].host for worker in _starting(run)) or any(
        _room_at(run, host) for host in ("", *run.hosts)
    )


def _room_at(run: RunState, host: str) -> bool:
    """May another worker be started there?"""
    known = [worker for worker in run.workers.values() if worker.host == host]
    there = [worker for worker in known if worker.status != "dead" and not worker.leaving]
    if not host:
        return not final(run) and run.stillborn < MAX_STILLBORN and len(there) < run.settings.own_workers
    room = run.hosts[host]
    return room.stillborn < MAX_STILLBORN and len(there if run.settings.replace else known) < room.workers


def _start(run: RunState, host: str) -> d.Spawn:
    dead = [worker for worker in run.with_status("dead") if run.workers[worker].host == host]
    if dead and (run.settings.replace or not host):
        return d.Spawn(worker=dead[0], incarnation=run.workers[dead[0]].incarnation + 1, host=host)
    return d.Spawn(worker=f"w{len(run.workers)}", incarnation=1, host=host)


def let_go(run: RunState) -> d.Release | d.TurnAway | None:
    """Workers that were to leave and have nothing any more exit; machines that ruin their workers are sent away."""
    for host, room in run.hosts.items():
        if room.failure or (room.workers and room.stillborn >= MAX_STILLBORN):
            reason = room.failure or f"{room.stillborn} workers in a row died there before they were ready"
            return d.TurnAway(host=host, reason=reason)
    giving = {worker for r in run.live.values() for worker in r.leavers.values()}
    giving |= {worker for r in run.live.values() if r.phase == "link" for worker in r.lenders.values()}
    for worker in run.with_status("spare"):
        if run.workers[worker].leaving and worker not in giving:
            return d.Release(worker=worker)
    return None


def reopen(run: RunState) -> d.Found | None:
    """A replica that is not there begins, or begins anew, as a copy of another, once there are enough workers."""
    gone = [replica for replica in run.replicas.values() if replica.phase == "left"]
    spare = len(run.spares) - run.vacancies - _leaving(run)
    if not gone or spare <= run.settings.stages or run.allotment.done or run.stopping:
        return None
    whole = any(can_be_copied(replica) for replica in run.live.values())
    return d.Found(replica=gone[0].number) if whole else None
