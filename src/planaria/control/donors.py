"""Sources of a replica's lost states: other replicas, its own other nodes, the seed, or disk. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set

from planaria.control.facts import decisions as d
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState


def lost_stages(replica: ReplicaState) -> frozenset[int]:
    """Return the stages whose state no worker of the replica has, and that no worker can restart from seed or disk.

    A stage is lost with the last node that had its state; until then, its nodes copy each other. A worker that should
    hand it over may still have it.
    """
    stage_of = replica.arrangement.stage
    # Nodes of one stage hold the same state: if one starts from seed or disk, so does another one that was lost.
    stages_with_origin = {stage_of[node] for node in replica.origins if node in replica.holders}
    missing = frozenset(stage_of[node] for node in replica.lost - replica.handover_from.keys())
    return missing - set(replica.stateful.stages) - stages_with_origin


def find_donor_replicas(run: RunState, replica: ReplicaState, lost: Set[int]) -> dict[int, ReplicaState] | None:
    """Return stage → replica that sends it; None while none is ready; {} if none will have the ``lost`` stages.

    A complete replica sends all; each attempt uses the next one. If every replica lost stages, they send each other's.
    A replica without any stage waits for a complete one to copy.
    """
    synchronised = run.exchange.synchronised
    lost_all_stages = lost == set(replica.arrangement.stages)
    others = [r for n, r in run.live.items() if n != replica.number and not r.is_stateless]
    if synchronised:
        furthest = max((r.settled_rounds for r in others), default=0) if lost_all_stages else replica.rounds
        others = [r for r in others if r.settled_rounds >= furthest]
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


def _will_have(replica: ReplicaState, stage: int, synchronised: bool) -> bool:
    """Return whether the stage will soon be available. If two synchronised replicas lost it, only one rebuilds it."""
    kept = set(replica.arrangement.nodes(stage)) - (replica.lost - replica.handover_from.keys())
    return bool(kept) or (synchronised and replica.phase == "link")


def state_sources(
    replica: ReplicaState,
    holders: Mapping[int, str],
    donor_replicas: Mapping[int, ReplicaState],
    rebuilt: Mapping[int, tuple[str, tuple[int, ...]]],
) -> dict[int, d.Source]:
    """Return the source of each node's state; a donor may itself be new, with a state from seed or disk."""
    stage_of = replica.arrangement.stage
    alive, present = replica.stateful, replica.arrangement.of(holders)
    origin_of_stage = {
        stage_of[node]: (node, source) for node, source in replica.origins.items() if node in replica.holders
    }
    sources: dict[int, d.Source] = {node: replica.origins.get(node, d.Keep()) for node in holders}
    for node, source in sources.items() if replica.started.start_from_first_worker else ():
        first = present.nodes(stage_of[node])[0]
        if isinstance(source, d.Fresh) and node != first:
            sources[node] = d.Rebuild(by=d.PEER, donors=[first])
    for node in replica.lost & holders.keys():
        stage = stage_of[node]
        leaver = replica.handover_from.get(node)
        if leaver is not None:
            sources[node] = d.Keep() if holders[node] == leaver else d.Handover(worker=leaver)
        elif not alive.nodes(stage) and stage in origin_of_stage:
            first, source = origin_of_stage[stage]
            # Other nodes of a stage copy the state that its first node has in memory.
            copies = isinstance(source, d.Recall) or replica.started.start_from_first_worker
            sources[node] = d.Rebuild(by=d.PEER, donors=[first]) if copies else source
        elif stage in donor_replicas:
            kind = d.CatchUp if replica.behind.get(node) == holders[node] else d.Rebuild
            sources[node] = kind(by=d.PEER, donors=[donor_replicas[stage].stateful.nodes(stage)[0]])
        else:
            by, donors = rebuilt.get(stage, (d.PEER, (stage,)))
            sources[node] = d.Rebuild(by=by, donors=[(alive.nodes(s) or present.nodes(s))[0] for s in donors])
    return sources
