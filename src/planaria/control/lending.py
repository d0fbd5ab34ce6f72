"""From which other replicas one copies the stages that it has lost. Pure.

Where an exchange keeps replicas synchronised, a stage must not come from one that has settled fewer rounds,
nor from one that is about to settle another.
"""

from __future__ import annotations

from collections.abc import Set

from planaria.record.replica import ReplicaState
from planaria.record.state import RunState


def lenders(run: RunState, replica: ReplicaState, gone: Set[int]) -> dict[int, ReplicaState] | None:
    """Stage → who lends its state, if anybody has what is ``gone``; None while those who will are not ready.

    A replica that is whole lends all; each attempt asks the next one. Where every one has lost something, they help one
    another. Without a stage of its own, a replica waits for a whole one to copy.
    """
    synchronised, hollow = run.rule.synchronised, gone == set(replica.arrangement.stages)
    others = [r for n, r in run.live.items() if n != replica.number and not r.hollow]
    if synchronised:
        furthest = max((settled(r) for r in others), default=0) if hollow else replica.rounds
        others = [r for r in others if settled(r) >= furthest]
    ready = [r for r in others if r.phase != "link" and not r.origins and not (synchronised and r.meeting)]
    turn = replica.number + replica.attempts
    if whole := [r for r in ready if not r.broken]:
        return dict.fromkeys(sorted(gone), whole[turn % len(whole)])
    if hollow:
        return None if others else {}
    if not all(any(_will_have(r, stage, synchronised) for r in others) for stage in gone):
        return {}
    ready = [r for r in ready if not synchronised or r.rounds == replica.rounds]
    having = {stage: [r for r in ready if stage in r.stateful.stages] for stage in sorted(gone)}
    if any(r.phase == "link" for r in others) or not all(having.values()):
        return None
    return {stage: found[turn % len(found)] for stage, found in having.items()}


def settled(replica: ReplicaState) -> int:
    """Rounds of the exchange that its state has behind it."""
    return replica.meeting.round if replica.meeting else replica.rounds


def can_be_copied(replica: ReplicaState) -> bool:
    """Is all of it there, and in no round?"""
    return not (replica.broken or replica.meeting or replica.origins or replica.phase == "link")


def _will_have(replica: ReplicaState, stage: int, synchronised: bool) -> bool:
    """Will the stage be had there soon? Those that must stay synchronised do not both make up what both have lost."""
    kept = set(replica.arrangement.nodes(stage)) - (replica.lost - replica.leavers.keys())
    return bool(kept) or (synchronised and replica.phase == "link")
