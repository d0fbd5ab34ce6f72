"""``decide(state)``: the next decision, or None until something happens. Pure.

Every decision changes the state it was made from (through ``apply``), so ``decide`` never repeats one. This module
decides a replica's next phase, the end of a run, and the removal of members whose updates are repeatedly invalid.
Other modules decide:

- ``control/checkpoint_decisions.py``: saving, sealing and cancelling checkpoints;
- ``control/formation.py``: new generations, with lost stages replaced;
- ``control/rounds.py``: rounds of the exchange and their groups;
- ``control/features.py``: features such as gradient coding, whose steps continue without stragglers;
- ``exchange/robust/controller.py``: steps that continue without Byzantine replicas;
- ``control/worker_assignment.py``: workers to start and to release;
- ``control/diagnosis.py``, ``control/slow_parts.py``: slow workers and links, and reactions to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from planaria.control import decisions as d
from planaria.control.checkpoint_decisions import (
    all_saved,
    discard,
    ends,
    gave_up,
    quiet,
    resting,
    save,
    save_survivors,
    saves,
    seal,
    unchanged,
)
from planaria.control.diagnosis import diagnose, stuck_link
from planaria.control.features import lead
from planaria.control.formation import form, hopeless, relieve, too_late, without_worker
from planaria.control.replica import ReplicaState
from planaria.control.roster import MAX_FAILED_STARTS
from planaria.control.rounds import behind, due, meet, next_block
from planaria.control.slow_parts import reroute, steer
from planaria.control.state import RunState
from planaria.control.worker_assignment import (
    fit_spares,
    handing_over,
    leaving,
    release_leaving,
    restart_replica,
    staff,
)
from planaria.exchange.robust.controller import disagreement, left_out

MAX_ATTEMPTS = 20


def decide(run: RunState) -> d.Decision | None:
    """Return the next decision in ``run``; None if it has to wait for events."""
    if run.over or (run.undecided is not None and not run.undecided):
        return None
    if run.failed:
        return d.Finish(outcome="failed", reason=run.failed)
    if run.prompt and not run.allotment.done and unchanged(run):
        return _stopped(run)
    if (about_disk := seal(run) or discard(run)) is not None:
        return about_disk
    concerned = _replicas_to_decide(run)
    for replica in concerned:
        if (decision := _decide_for(run, replica)) is not None:
            return decision
    return meet(run, concerned) or _finish(run) or release_leaving(run) or restart_replica(run) or staff(run)


def _replicas_to_decide(run: RunState) -> list[ReplicaState]:
    """Return the replicas that may need a decision, in order: those that changed since ``decide`` last returned None,
    and those that other replicas' changes affect."""
    if run.undecided is None or ends(run) or saves(run):
        return list(run.live.values())
    numbers = run.undecided | run.replicas.troubled | behind(run)
    if run.roster.leaving:
        numbers |= {run.replicas.standing[worker] for worker in run.roster.leaving & run.replicas.standing.keys()}
    return [run.replicas[number] for number in sorted(numbers - run.replicas.gone)]


def _decide_for(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Return a replica's next decision that does not involve others."""
    beyond_recall = replica.phase in ("commit", "settle", "save")
    stops = run.prompt and replica.whole
    if not (stops or replica.cannot or beyond_recall):
        if run.overdue:
            return too_late(run, replica)
        if replica.attempts >= MAX_ATTEMPTS:
            reason = f"{replica.attempts} generations in a row did not get step {replica.step} committed"
            last = f"; the last error: {replica.trouble}" if replica.trouble else ""
            return without_worker(run, replica, reason + last, [])
    if replica.phase == "run" and not replica.waiting:
        if (different := disagreement(run, replica)) is not None:
            return different
        progress = run.settings.progress(run.allotment.out[replica.number])
        return d.Commit(replica=replica.number, generation=replica.generation, step=replica.step, progress=progress)
    if replica.phase == "run" and replica.progress is not None:
        return lead(run, replica)
    if replica.phase != "idle" or has_leaving_workers(run, replica):
        return None
    if replica.cannot:
        return save_survivors(run, replica)
    unfilled = replica.skipped & set(replica.vacant) and fit_spares(run)
    if replica.broken or unfilled:
        if stops:
            return _decide_idle(run, replica)
        return (None if run.silent else stuck_link(run, replica)) or form(run, replica)
    about_slowness = diagnose(run, replica) or steer(run, replica) or reroute(run, replica)
    return about_slowness or dismiss(run, replica) or relieve(run, replica) or _decide_idle(run, replica)


def _decide_idle(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Return the next decision of an idle replica: meet, validate, save, or train, in this order. Skipped steps are not
    saved."""
    settings, step, number = run.settings, replica.step, replica.number
    done, block = run.allotment.done, next_block(run, replica)
    if replica.meeting and step >= replica.meeting.settle_at:
        return None
    if due(run, replica) and not run.stopping:
        return None
    if not replica.whole:
        if done or run.stopping:
            return hopeless(run, replica)
    else:
        evaluate = settings.eval_every and (done or step % settings.eval_every == 0)
        if evaluate and step > replica.evaluated and not run.stopping:
            return d.RunStep(replica=number, generation=replica.generation, step=step, mode="evaluate")
        if (saved := save(run, replica)) is not None:
            return saved
    if block is None or run.stopping:
        return None
    without = left_out(run)
    return d.RunStep(replica=number, generation=replica.generation, step=step, block=block, left_out=without)


def _finish(run: RunState) -> d.Finish | None:
    """End the run when all is done and saved, or when the last replica cannot continue or be saved."""
    if run.writing:  # otherwise a truncated file would remain
        return None
    reason = next((replica.cannot for replica in run.troubled if replica.cannot), "")
    if not reason and (run.saving >= 0 or not ends(run)):
        return None
    unsaved = gave_up(run)
    if reason:
        idle = all(replica.phase == "idle" for replica in run.live.values())
        full = f"{reason}; the last checkpoint could not be saved: {unsaved}" if unsaved else reason
        return d.Finish(outcome="cannot", reason=full) if idle and resting(run) is None else None
    if not quiet(run):
        return None
    if not all_saved(run):
        return d.Finish(outcome="failed", reason=unsaved) if unsaved else None
    if run.allotment.done:
        return d.Finish(outcome="finished")
    return _stopped(run)


def _stopped(run: RunState) -> d.Finish:
    """Return the end of a run that is stopped, with the cause that prevented progress, if there was one."""
    trouble = next((replica.trouble for replica in run.live.values() if replica.trouble), "")
    return d.Finish(outcome="stopped", reason=run.stopping, detail=(run.overdue or trouble) if run.prompt else "")


def dismiss(run: RunState, replica: ReplicaState) -> d.SendAway | None:
    """Dismiss the workers of a replica, or of a Byzantine one among replicas that make each step together."""
    enough = run.settings.exchange.strikes
    if not enough or not run.suspicion.refusals or replica.meeting or run.stopping or run.allotment.done:
        return None
    for member, nodes in _members(run, replica):
        strikes, workers = run.suspicion.strikes(member, run.rule), {replica.holders[node] for node in nodes}
        if strikes >= enough and not workers & handing_over(run) and (_others(run, workers) or _dispensable(run)):
            when = "rounds" if run.rule.interval else "steps"
            reason = f"the updates of replica {member} were invalid in {strikes} {when}"
            return d.SendAway(member=member, workers=sorted(workers), strikes=strikes, reason=reason)
    return None


def has_leaving_workers(run: RunState, replica: ReplicaState) -> bool:
    """Return whether workers of the replica are leaving; until they exit, it starts nothing new."""
    released = run.with_status("released")
    return bool(released) and any(run.replicas.standing.get(worker) == replica.number for worker in released)


def _members(run: RunState, replica: ReplicaState) -> Iterator[tuple[int, Collection[int]]]:
    """Yield the members of the exchange by number with their nodes: replicas, or the parts of a step made together."""
    if run.rule.interval:
        yield replica.number, replica.arrangement.stage
        return
    columns = [replica.arrangement.nodes(stage) for stage in replica.arrangement.stages]
    yield from enumerate(zip(*columns, strict=True))


def _others(run: RunState, workers: Collection[str]) -> bool:
    """Return whether others can replace these workers: spares, or new ones."""
    if fit_spares(run) - run.vacancies - leaving(run) >= len(workers):
        return True
    at_home = not any(run.workers[worker].host for worker in workers)
    return run.settings.replace and at_home and run.failed_starts < MAX_FAILED_STARTS


def _dispensable(run: RunState) -> bool:
    """Return whether the others can continue with one replica less; those that make each step together cannot."""
    left = len(run.live) - 1
    return bool(run.rule.interval) and left > 0 and not run.rule.objection(left)
