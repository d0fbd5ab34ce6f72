"""``decide(state)``: the next decision, or None until something happens. Pure.

Every decision changes the state it was made from (through ``apply``), so ``decide`` never repeats one. This module
decides a replica's next phase and the end of a run. Other modules decide:

- ``control/checkpoint_decisions.py``: saving, sealing and cancelling checkpoints;
- ``control/formation.py``: new generations, with lost stages replaced;
- ``control/rounds.py``: rounds of the exchange and their groups;
- ``exchange/coded/coded_decisions.py``: coded steps that continue without stragglers;
- ``control/exclusion.py``: the removal of members whose updates are repeatedly invalid;
- ``exchange/robust/exclusion_decisions.py``: steps that continue without Byzantine replicas;
- ``control/spares.py``: workers to start and to release;
- ``control/slowness/``: slow workers and links, and reactions to them.
"""

from __future__ import annotations

from planaria.control.apply import apply
from planaria.control.apply_base import record_report
from planaria.control.checkpoint_decisions import (
    all_idle,
    all_saved,
    discard,
    final_save_error,
    is_ending,
    nothing_to_save,
    save,
    save_awaiting_retry,
    save_survivors,
    saving_affects_all,
    seal,
)
from planaria.control.exclusion import exclude_invalid_sender, exclude_member
from planaria.control.facts import decisions as d
from planaria.control.formation import (
    end_if_unstaffed,
    end_overdue_wait,
    end_replica,
    form_generation,
    hand_over_stages,
)
from planaria.control.rounds import decide_round, is_round_due, next_block, stale_replicas
from planaria.control.slowness.decisions import diagnose, hand_over_slow_stage, reroute
from planaria.control.slowness.edges import stuck_link
from planaria.control.spares import count_suitable_spares, release_leaving, restart_replica, spawn_if_needed
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState
from planaria.exchange.coded.coded_decisions import close_round
from planaria.exchange.robust.exclusion_decisions import disagreement, left_out

MAX_ATTEMPTS = 20
"""generations in a row that a replica may form without committing its step, before it ends"""


def decide(run: RunState) -> d.Decision | None:
    """Return the next decision in ``run``, or None if it has to wait for events."""
    if run.over or not run.undecided:
        return None
    if run.failed:
        return d.Finish(outcome="failed", reason=run.failed)
    if run.stops_before_repair and not run.allocation.done and nothing_to_save(run):
        return _finish_stopped(run)
    if (about_disk := seal(run) or discard(run)) is not None:
        return about_disk
    candidates = _replicas_to_decide(run)
    for replica in candidates:
        if (decision := _decide_for(run, replica)) is not None:
            return decision
    return (
        decide_round(run, candidates)
        or _finish(run)
        or release_leaving(run)
        or restart_replica(run)
        or spawn_if_needed(run)
    )


def _replicas_to_decide(run: RunState) -> list[ReplicaState]:
    """Return the replicas that may need a decision, in order: those that changed since ``decide`` last returned None,
    and those that other replicas' changes affect."""
    if is_ending(run) or saving_affects_all(run) or _before_joint_first_step(run):
        return list(run.live.values())
    numbers = run.undecided | run.replicas.troubled | stale_replicas(run)
    if run.roster.leaving:
        numbers |= {
            run.replicas.replica_of_worker[worker]
            for worker in run.roster.leaving & run.replicas.replica_of_worker.keys()
        }
    return [run.replicas[number] for number in sorted(numbers - run.replicas.left)]


def _decide_for(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Return a replica's next decision that does not involve others."""
    cannot_cancel = replica.phase in ("commit", "settle", "save")
    stops = run.stops_before_repair and replica.whole
    may_give_up = not (stops or replica.unrecoverable_reason or cannot_cancel)
    if may_give_up and run.overdue:
        return end_overdue_wait(run, replica)
    if may_give_up and replica.attempts >= MAX_ATTEMPTS:
        return _end_after_attempts(run, replica)
    if replica.phase == "run":
        return _decide_running(run, replica)
    if replica.phase != "idle" or _waits_for_released_workers(run, replica):
        return None
    if replica.unrecoverable_reason:
        return save_survivors(run, replica)
    unfilled = replica.skipped & set(replica.vacant) and count_suitable_spares(run)
    if (replica.broken or unfilled) and not stops:
        link = None if run.unreachable_relays else stuck_link(run, replica)
        return link or exclude_invalid_sender(run, replica) or form_generation(run, replica)
    if replica.broken or unfilled:
        return _decide_idle(run, replica)
    return (
        diagnose(run, replica)
        or hand_over_slow_stage(run, replica)
        or reroute(run, replica)
        or exclude_member(run, replica)
        or hand_over_stages(run, replica)
        or _decide_idle(run, replica)
    )


def _end_after_attempts(run: RunState, replica: ReplicaState) -> d.Decision:
    reason = f"{replica.attempts} generations in a row did not get step {replica.step} committed"
    last = f"; the last error: {replica.last_edge_failure}" if replica.last_edge_failure else ""
    return end_replica(run, replica, reason + last, [])


def _decide_running(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Return the next decision of a replica in a step: its commit, once all stages are ready."""
    if not replica.waiting:
        if (exclusion := disagreement(run, replica)) is not None:
            return exclusion
        progress = run.started.progress(run.allocation.in_progress[replica.number])
        commit = d.Commit(replica=replica.number, generation=replica.generation, step=replica.step, progress=progress)
        if not run.started.reserve_blocks:
            return commit
        return commit.model_copy(update={"next_block": _block_after(run, replica, commit)})
    return None if replica.coded is None else close_round(run, replica)


def _block_after(run: RunState, replica: ReplicaState, commit: d.Commit) -> int | None:
    """Return the block of the replica's step after ``commit``, or None if another decision comes first."""
    run = apply(commit, run)
    for worker in run.replicas[replica.number].waiting:
        run = record_report(run, run.replicas[replica.number], worker)
    following = _decide_for(run, run.replicas[replica.number])
    return following.block if isinstance(following, d.RunStep) and following.mode == "train" else None


def _decide_idle(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Return the next decision of an idle replica: validate, save or train, in this order, or None if a round is due.
    Skipped steps are not saved."""
    settings, step, number = run.started, replica.step, replica.number
    done, block = run.allocation.done, next_block(run, replica)
    if replica.open_round and step >= replica.open_round.settle_at:
        return None
    if is_round_due(run, replica) and not run.stopping:
        return None
    if not replica.whole:
        if done or run.stopping:
            return end_if_unstaffed(run, replica)
    else:
        evaluate = settings.eval_every and (done or step % settings.eval_every == 0)
        if evaluate and step > replica.evaluated and not run.stopping:
            return d.RunStep(replica=number, generation=replica.generation, step=step, mode="evaluate")
        if (saved := save(run, replica)) is not None:
            return saved
    if block is None or run.stopping or _waits_for_first_copies(run):
        return None
    without = left_out(run)
    return d.RunStep(replica=number, generation=replica.generation, step=step, block=block, left_out=without)


def _waits_for_first_copies(run: RunState) -> bool:
    """Return whether the first step waits for workers that start from the first one's weights."""
    waits = _before_joint_first_step(run) and not run.join_timed_out and not run.allocation.in_progress
    return waits and any(not replica.whole for replica in run.live.values())


def _before_joint_first_step(run: RunState) -> bool:
    """Return whether the run has not committed its first step, which waits for all replicas."""
    return run.started.start_from_first_worker and len(run.allocation.used) == 0


def _finish(run: RunState) -> d.Finish | None:
    """End the run when all is done and saved, or when the last replica cannot continue or be saved."""
    if run.writing:  # otherwise a truncated file would remain
        return None
    reason = next((replica.unrecoverable_reason for replica in run.troubled if replica.unrecoverable_reason), "")
    if not reason and (run.saving >= 0 or not is_ending(run)):
        return None
    unsaved = final_save_error(run)
    if reason:
        idle = all(replica.phase == "idle" for replica in run.live.values())
        full = f"{reason}; the last checkpoint could not be saved: {unsaved}" if unsaved else reason
        return d.Finish(outcome="cannot", reason=full) if idle and save_awaiting_retry(run) is None else None
    if not all_idle(run):
        return None
    if not all_saved(run):
        return d.Finish(outcome="failed", reason=unsaved) if unsaved else None
    if run.allocation.done:
        return d.Finish(outcome="finished")
    return _finish_stopped(run)


def _finish_stopped(run: RunState) -> d.Finish:
    """Return the end of a run that is stopped, with the cause that prevented progress, if there was one."""
    trouble = next((replica.last_edge_failure for replica in run.live.values() if replica.last_edge_failure), "")
    return d.Finish(
        outcome="stopped", reason=run.stopping, detail=(run.overdue or trouble) if run.stops_before_repair else ""
    )


def _waits_for_released_workers(run: RunState, replica: ReplicaState) -> bool:
    """Return whether workers of the replica are released; until they exit, it starts nothing new."""
    released = run.with_status("released")
    return bool(released) and any(run.replicas.replica_of_worker.get(worker) == replica.number for worker in released)
