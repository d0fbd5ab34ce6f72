"""Decisions about checkpoints: their interval, and when they start, are sealed or are cancelled. Pure.

A failed save does not stop the run, which continues with the previous checkpoint and tries again at the next interval.
The last save of a run is retried several times; if all fail, the run fails with a message.

In the background, a save ends for a replica as soon as its workers hold copies; the checkpoint is sealed when the last
file is written. At most one is in progress: another that becomes due meanwhile is made at the first step afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from planaria.control.facts import decisions as d
from planaria.control.facts.events import ReplicaPosition
from planaria.control.rounds import is_round_due
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState
from planaria.exchange.registry import make_exchange

LAST_TRIES = 3
"""attempts to save the final state"""


def save(run: RunState, replica: ReplicaState) -> d.Save | None:
    """Save an idle replica if a checkpoint is due."""
    name = None if _busy(run, replica) else _to_save(run, replica)
    return None if name is None else _save(run, replica, name)


def _busy(run: RunState, replica: ReplicaState) -> bool:
    """Return whether a worker of the replica still writes a file of an earlier save; a worker writes one at a time."""
    parts = {part.replica for part in run.writing.values()}
    return replica.number in parts or not run.writing.keys().isdisjoint(replica.holders.values())


def _save(run: RunState, replica: ReplicaState, name: int) -> d.Save:
    config, stateful = run.started.exchange, replica.stateful
    own = any(sharing != "shared" for sharing in make_exchange(config).parts.values())
    several = stateful.shared and config.replicas > 1
    copies = sorted(stateful.stage.keys() - set(stateful.firsts))
    return d.Save(
        replica=replica.number,
        generation=replica.generation,
        step=name,
        whole=list(stateful.firsts) if own and several and not run.started.lockstep_replicas else [],
        compared=copies if run.exchange.bit_identical and several else [],
        background=run.started.save_in_background and not is_ending(run) and not replica.unrecoverable_reason,
    )


def _to_save(run: RunState, replica: ReplicaState) -> int | None:
    """Return the checkpoint to save this replica for: the one in progress, or a new one."""
    if not run.started.saves:
        return None
    if run.saving >= 0:
        return run.saving if replica.saved != run.saving else None
    if not _may_begin(run):
        return None
    if is_ending(run):
        return run.progress if all_idle(run) and not all_saved(run) else None
    return run.progress if _checkpoint_reached(run) else None


def _checkpoint_reached(run: RunState) -> bool:
    before = max(run.saved, run.started.first_step, run.unsaved.since if run.unsaved else -1)
    return bool(run.save_every) and run.progress // run.save_every > before // run.save_every


def saving_affects_all(run: RunState) -> bool:
    """Return whether replicas are being saved, must be saved, or could not be saved, which affects all."""
    return (run.saving >= 0 or run.unsaved is not None or _checkpoint_reached(run)) and not is_being_written(run)


def _may_begin(run: RunState) -> bool:
    """Return whether a checkpoint may start: not before a failed one's files are removed, nor repeatedly under one
    name."""
    last = run.unsaved
    if last is None or last.step != run.progress:
        return last is None or last.discarded
    return last.discarded and last.rested and last.tries < LAST_TRIES


def save_awaiting_retry(run: RunState) -> int | None:
    """Return the name of the last failed save if it will be retried after a pause."""
    last = run.unsaved
    if run.over or last is None or last.rested or last.tries >= LAST_TRIES:
        return None
    if not is_ending(run) and not any(replica.unrecoverable_reason for replica in run.troubled):
        return None
    return last.step if last.step == run.progress else None


def final_save_error(run: RunState) -> str:
    """Return why all attempts to save the final state failed, or an empty string if it was saved or may still be."""
    last = run.unsaved
    if last is None or last.step != run.progress or last.tries < LAST_TRIES or not last.discarded:
        return ""
    fallback = f"the newest checkpoint is {run.durable.folder}" if run.durable.folder else "there is no checkpoint"
    return f"the last save failed {last.tries} times: {last.detail}; {fallback}"


def is_ending(run: RunState) -> bool:
    """Return whether the replicas will make no more steps."""
    return bool(run.stopping) or run.allocation.done


def nothing_to_save(run: RunState) -> bool:
    """Return whether every replica is at the newest checkpoint or the run's start, so that a stop need not save."""
    if run.saving >= 0 or run.writing or run.saved not in (-1, run.progress):
        return False
    if any(replica.unrecoverable_reason for replica in run.troubled):
        return False
    moving = any(replica.phase in ("commit", "settle", "save") for replica in run.live.values())
    return not moving and all(run.durable.positions.get(n) == replica.position for n, replica in run.live.items())


def all_idle(run: RunState) -> bool:
    """Return whether every replica is idle or being saved, and no round is open, or due unless the run stops."""
    live = run.live.values()
    at_rest = all(r.phase in ("idle", "save") and run.can_save(r) and not r.open_round for r in live)
    return at_rest and (bool(run.stopping) or not any(is_round_due(run, replica) for replica in run.live.values()))


def all_saved(run: RunState) -> bool:
    """Return whether the newest checkpoint of this run holds the replicas' current states, or none is written."""
    if not run.started.saves:
        return True
    same = all(run.durable.positions.get(n) == replica.position for n, replica in run.live.items())
    return run.saved == run.progress and same


def save_survivors(run: RunState, replica: ReplicaState) -> d.Save | None:
    """Save the remaining stages of an unrecoverable replica. The run ends once the checkpoint is sealed or failed."""
    may_begin = run.started.saves and run.saving < 0 and not _busy(run, replica) and _may_begin(run)
    if run.saved != run.progress and replica.stateful.stages and may_begin:
        return _save(run, replica, run.progress)
    return None


def discard(run: RunState) -> d.Discard | None:
    """Remove the files of a failed save after all its writers have finished."""
    if run.unsaved is None or run.unsaved.discarded or run.writing or any(r.phase == "save" for r in run.live.values()):
        return None
    return d.Discard(step=run.unsaved.step)


def is_being_written(run: RunState) -> bool:
    """Return whether a checkpoint only lacks files that are being written in the background.

    Failures beyond repair then wait for it: losing it would cost more than the rest of the write.
    """
    return run.saving >= 0 and bool(run.writing) and all(r.saved == run.saving for r in run.live.values())


def seal(run: RunState) -> d.Seal | None:
    """Seal the checkpoint if all replicas are on disk; without the lost stages it is marked partial."""
    if run.saving < 0 or run.writing:
        return None
    replicas = run.live.values()
    if any(r.saved != run.saving or r.phase == "save" for r in replicas):
        return None
    stages = sorted(set.intersection(*(set(r.stateful.stages) for r in replicas)))
    cannot = any(replica.unrecoverable_reason for replica in replicas)
    if not cannot:
        stages = list(range(run.started.stages + 1))
    elif not stages:  # the last survivor died during its save
        return None
    partial, used = len(stages) <= run.started.stages, run.allocation.saved
    return d.Seal(
        step=run.saving,
        folder=folder_name(run.saving, partial),
        stages=stages,
        partial=partial,
        positions=_positions(run),
        first_block=used.floor,
        blocks_ahead=sorted(used.beyond),
        digests={r.number: dict(sorted(r.digests.items())) for r in replicas if r.digests},
        unequal=stages_with_unequal_weights(_weights(run)),
    )


def _positions(run: RunState) -> dict[int, ReplicaPosition]:
    if run.started.lockstep_replicas:
        every, step = run.exchange.interval, run.positions[0].step
        position = ReplicaPosition(step=step, rounds=step // every if every else 0, inner=step % every if every else 0)
        return dict.fromkeys(range(run.started.lockstep_replicas), position)
    return dict(run.positions) if run.started.max_replicas > 1 else {}


def _weights(run: RunState) -> dict[int, dict[int, str]]:
    """Return stage → replica → digest of the saved weights, if all replicas of a step must be equal."""
    digests: dict[int, dict[int, str]] = {}
    for replica in run.live.values() if run.exchange.bit_identical else ():
        for node, digest in sorted(replica.weight_digests.items()):
            stage = replica.arrangement.stage[node]
            digests.setdefault(stage, {})[replica.arrangement.peers(node).index(node)] = digest
    return digests


def stages_with_unequal_weights(weights: Mapping[int, Mapping[int, str]]) -> list[d.UnequalReplicas]:
    """Return the stages whose replicas reported different digests of their weights.

    Deviating replicas differ from more than half of at least three replicas; of two, neither can be identified.

    :param weights: stage → replica → digest.
    """
    unequal = []
    for stage, copies in sorted(weights.items()):
        ((most, count),) = Counter(copies.values()).most_common(1)
        if count < len(copies):
            invalid = [replica for replica, digest in sorted(copies.items()) if digest != most]
            unequal.append(
                d.UnequalReplicas(
                    stage=stage, replicas=sorted(copies), differing=invalid if 2 * count > len(copies) else []
                )
            )
    return unequal


def folder_name(step: int, partial: bool = False) -> str:
    """Return the name of the checkpoint of ``step`` within the run's folder of checkpoints."""
    return f"step-{step:08d}" + (".partial" if partial else "")
