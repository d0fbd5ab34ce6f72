"""``decide(state)``: what is to be done next, or nothing until something happens. Pure.

Every decision changes the state it was made from (through ``apply``), so asking again never repeats one. Here: what a
replica does next, and how a run ends. How lost stages are replaced is in ``control/formation.py``, when replicas meet
in ``control/rounds.py``, who is hired in ``control/staffing.py``.
"""

from __future__ import annotations

from planaria import decisions as d
from planaria.control.formation import form, hopeless, relieve, without_worker
from planaria.control.rounds import due, meet, next_block
from planaria.control.staffing import let_go, reopen, staff
from planaria.control.state import ReplicaState, RunState

MAX_ATTEMPTS = 20


def decide(run: RunState) -> d.Decision | None:
    """The next decision in ``run``; None when there is nothing to do but wait."""
    if run.over:
        return None
    if run.failed:
        return d.Finish(outcome="failed", reason=run.failed)
    if (seal := _seal(run)) is not None:
        return seal
    for replica in run.live.values():
        if (decision := _lead(run, replica)) is not None:
            return decision
    return meet(run) or _end(run) or let_go(run) or reopen(run) or staff(run)


def _lead(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """What one replica does next by itself."""
    beyond_recall = ("commit", "settle", "save")
    if replica.attempts >= MAX_ATTEMPTS and not replica.cannot and replica.phase not in beyond_recall:
        reason = f"{replica.attempts} generations in a row did not get step {replica.step} committed"
        return without_worker(run, replica, reason, [])
    if replica.phase == "run" and not replica.waiting:
        progress = run.settings.progress(run.allotment.out[replica.number])
        return d.Commit(replica=replica.number, generation=replica.generation, step=replica.step, progress=progress)
    if replica.phase != "idle":
        return None
    if replica.cannot:
        return _wind_up(run, replica)
    unfilled = replica.skipped & set(replica.vacant) and run.spares
    if replica.broken or unfilled:
        return form(run, replica)
    return relieve(run, replica) or _proceed(run, replica)


def _proceed(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """The replica is idle: meet, validate, save, or train on, in this order. What it skips, it does not save."""
    settings, step, number = run.settings, replica.step, replica.number
    done, block = run.allotment.done, next_block(run, replica)
    if replica.meeting and step >= replica.meeting.settle_at:
        return None
    if due(run, replica) and not run.stopping:
        return None
    if len(replica.stateful.stages) <= settings.stages:
        if done or run.stopping:
            return hopeless(run, replica)
    else:
        evaluate = settings.eval_every and (done or step % settings.eval_every == 0)
        if evaluate and step > replica.evaluated and not run.stopping:
            return d.RunStep(replica=number, generation=replica.generation, step=step, mode="evaluate")
        name = _to_save(run, replica)
        if name is not None:
            return d.Save(replica=number, generation=replica.generation, step=name)
    if block is None or run.stopping:
        return None
    return d.RunStep(replica=number, generation=replica.generation, step=step, block=block)


def _to_save(run: RunState, replica: ReplicaState) -> int | None:
    """The checkpoint that this replica is to be saved for now: one that others are being saved for, or a new one."""
    if run.saving >= 0:
        return run.saving if replica.saved != run.saving else None
    if run.stopping or run.allotment.done:
        return run.progress if _quiet(run) and not _all_saved(run) else None
    before = max(run.saved, run.settings.first_step)
    passed = run.save_every and run.progress // run.save_every > before // run.save_every
    return run.progress if passed else None


def _quiet(run: RunState) -> bool:
    """Has every replica come to rest, with no round before it?"""
    at_rest = all(r.phase in ("idle", "save") and not r.broken and not r.meeting for r in run.live.values())
    return at_rest and (bool(run.stopping) or not any(due(run, replica) for replica in run.live.values()))


def _all_saved(run: RunState) -> bool:
    """Is the newest checkpoint of this run of what its replicas are now?"""
    same = all(run.durable_standings.get(n) == replica.standing for n, replica in run.live.items())
    return run.saved == run.progress and same


def _wind_up(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """After *cannot*: save the survivors; the end comes when that is sealed."""
    if run.saved != run.progress and run.saving < 0 and replica.stateful.stages:
        return d.Save(replica=replica.number, generation=replica.generation, step=run.progress)
    return None


def _seal(run: RunState) -> d.Seal | None:
    """All replicas are on disk; a checkpoint without the lost stages is marked partial."""
    replicas = run.live.values()
    if run.saving < 0 or any(r.saved != run.saving or r.phase == "save" for r in replicas):
        return None
    stages = sorted(set.intersection(*(set(r.stateful.stages) for r in replicas)))
    cannot = any(replica.cannot for replica in replicas)
    if not cannot:
        stages = list(range(run.settings.stages + 1))
    elif not stages:  # the last survivor died while it was being saved
        return None
    partial, used = len(stages) <= run.settings.stages, run.allotment.saved
    return d.Seal(
        step=run.saving,
        folder=folder_name(run.saving, partial),
        stages=stages,
        partial=partial,
        standings=dict(run.standings) if run.settings.replicas > 1 else {},
        first_block=used.floor,
        blocks_ahead=sorted(used.beyond),
        digests={r.number: dict(sorted(r.digests.items())) for r in replicas if r.digests},
    )


def _end(run: RunState) -> d.Finish | None:
    """The run is over when all is done and saved, or when the last replica cannot go on."""
    reason = next((replica.cannot for replica in run.live.values() if replica.cannot), "")
    if reason:
        idle = all(replica.phase == "idle" for replica in run.live.values())
        return d.Finish(outcome="cannot", reason=reason) if idle else None
    if not _quiet(run) or not _all_saved(run) or run.saving >= 0:
        return None
    if run.allotment.done:
        return d.Finish(outcome="finished")
    return d.Finish(outcome="stopped", reason=run.stopping) if run.stopping else None


def folder_name(step: int, partial: bool = False) -> str:
    """Name of the checkpoint of ``step`` inside the run's folder of checkpoints."""
    return f"step-{step:08d}" + (".partial" if partial else "")
