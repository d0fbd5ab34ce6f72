"""Rounds of the exchange without a global barrier: their times and groups. Pure.

When the first replica reaches a round, groups are drawn from the present replicas. A member waits for the others of its
group for at most ``exchange.patience_s`` on the controller's clock; then those present meet without the rest, or a
single one settles alone. Members that settle together combine updates that all of them have received, so a member lost
on the way leaves no half-settled round.
"""

from __future__ import annotations

from collections.abc import Collection

from planaria.control.facts import decisions as d
from planaria.control.facts.members import link
from planaria.control.state.replica import ReplicaGroup, ReplicaState
from planaria.control.state.run import RunState
from planaria.exchange.robust.exclusion_decisions import equivocating_replicas, excluded_replicas, settle_weights

HELP_LAG_STEPS = 50
"""number of steps that a replica may lag before others take its blocks, without rounds"""
HELP_LAG_STEPS_AFTER_LOSS = 1
"""the same after a replica was lost or joined"""


def is_round_due(run: RunState, replica: ReplicaState) -> bool:
    """Return whether the replica has made its steps since the last round.

    A decoupled replica that need not wait for all makes up to ``overlap`` more until all others can take part; one that
    has missed a round catches up immediately.
    """
    if replica.open_round or run.started.max_replicas == 1:
        return False
    exchange, config = run.exchange, run.started.exchange
    if exchange.decoupled and _ahead_of(run, replica.rounds):
        return True
    own = config.steps_between_rounds[replica.number : replica.number + 1]  # replicas that join later have none
    every = own[0] if exchange.interval and own else exchange.interval
    if not every or replica.steps_since_round < every:
        return False
    waits = not exchange.decoupled or exchange.quorum(len(run.live)) == len(run.live) - 1  # for all
    if waits or replica.steps_since_round >= every + exchange.overlap:
        return True
    return all(_can_join_round(run, other, replica.rounds) for other in run.live.values())


def next_block(run: RunState, replica: ReplicaState) -> int | None:
    """Return the block of samples of the replica's next step, or None if none is left for it."""
    return run.allocation.next_for(replica.number, run.replicas.left, _help_lag_steps(run, replica))


def _help_lag_steps(run: RunState, replica: ReplicaState) -> int:
    """Return how many steps others may lag before the replica helps them.

    The lag is large until a replica is formed again, so that small speed differences do not change a run's results.
    """
    settings = run.started
    if replica.number >= settings.replicas:  # it joined later and has no samples
        return 0
    if run.replicas.generation > settings.first_generation + settings.replicas:
        return HELP_LAG_STEPS_AFTER_LOSS
    return 2 * (run.exchange.interval or HELP_LAG_STEPS)


def decide_round(run: RunState, candidates: Collection[ReplicaState]) -> d.Decision | None:
    """Return the next decision about rounds for these replicas, or for all if samples run out, because a missing
    replica may then block others."""
    if run.started.max_replicas == 1:
        return None
    if not run.allocation.has_block_for_every_replica:
        candidates = run.live.values()
    exchange = run.exchange
    for replica in _with_groups(run, candidates) if exchange.prefetches else candidates:
        decision: d.Decision | None = None
        if _is_ready_to_settle(run, replica):
            decision = _settle(run, replica)
        elif _has_reached_next_round(run, replica) and not run.stopping:
            decision = _begin_round(run, replica)
        elif exchange.prefetches and not run.stopping:
            decision = _open_prefetch_links(run, replica)
        if decision is not None:
            return decision
    return None


def _with_groups(run: RunState, replicas: Collection[ReplicaState]) -> list[ReplicaState]:
    """Return these replicas and their groups' members, in order; none that has reached a round starts a prefetch."""
    groups = (_group(run.groups.get(replica.rounds, ()), replica.number) for replica in replicas)
    numbers = {number for group in groups for number in group} - run.replicas.left
    return [run.replicas[number] for number in sorted(numbers)]


def stale_replicas(run: RunState) -> frozenset[int]:
    """Return the replicas that missed a settled round and must copy a replica that settled it."""
    if run.started.max_replicas == 1 or not run.exchange.synchronised:
        return frozenset()
    rounds = {number: replica.settled_rounds for number, replica in run.live.items()}
    latest = max(rounds.values())
    return frozenset(number for number, own in rounds.items() if own < latest)


def round_wait_key(run: RunState, replica: ReplicaState) -> tuple[int, int, bool] | None:
    """Return (replica, round, whether its round has begun) of a replica that waits within its patience."""
    if run.started.max_replicas == 1 or replica.phase == "left":
        return None
    key = None
    if replica.open_round and _is_ready_to_settle(run, replica):
        key = replica.number, replica.open_round.round, True
    elif _has_reached_next_round(run, replica):
        key = replica.number, replica.rounds, False
    return None if key in run.expired_round_waits else key


def has_quorum(run: RunState, replica: ReplicaState) -> bool:
    """Return whether the replica has received enough updates in its round to settle without silent members."""
    if replica.open_round is None:
        return False
    if run.exchange.decoupled:  # the first to settle need not wait; if the updates that count are lost, others catch up
        return bool(replica.open_round.contributors)
    senders = [n for n in replica.open_round.members if n != replica.number]
    enough = run.exchange.quorum(len(senders) + 1)
    return enough < len(senders) and sum(map(replica.has_received, senders)) >= enough


def _is_idle(run: RunState, replica: ReplicaState) -> bool:
    return replica.phase == "idle" and run.can_save(replica)


def _is_ready_to_settle(run: RunState, replica: ReplicaState) -> bool:
    """Return whether the replica waits at the end of its round or has no samples left."""
    if not replica.open_round or not _is_idle(run, replica):
        return False
    return replica.step >= replica.open_round.settle_at or bool(run.stopping) or next_block(run, replica) is None


def _has_reached_next_round(run: RunState, replica: ReplicaState) -> bool:
    return _is_idle(run, replica) and is_round_due(run, replica)


def _begin_round(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Start the round of a replica that reached it, once the others of its group have, or are late."""
    exchange, round, live = run.exchange, replica.rounds, run.live
    if exchange.synchronised and (ahead := [r for r in live.values() if r.rounds > round and not r.is_stateless]):
        return _catch_up(replica, round, ahead)
    if round not in run.groups and not exchange.synchronised:
        return _draw(run, round)
    if exchange.decoupled:
        return _begin_decoupled(run, round)
    group = tuple(live) if exchange.synchronised else _group(run.groups[round], replica.number)
    expected = [n for n in group if n in live and live[n].rounds <= round and _can_reach_round(run, live[n])]
    present = [n for n in expected if live[n].rounds == round and _has_reached_next_round(run, live[n])]
    if present != expected and not any((n, round, False) in run.expired_round_waits for n in present):
        return None
    return _begin(run, round, present)


def _begin(run: RunState, round: int, members: list[int]) -> d.Decision:
    """Let the ``members`` exchange updates; a single one settles alone."""
    generations = [run.live[n].generation for n in members]
    if len(members) == 1:
        return d.Settle(round=round, members=members, generations=generations)
    return d.BeginRound(round=round, members=members, generations=generations, links=_links(run, round, members))


def _begin_decoupled(run: RunState, round: int) -> d.Decision | None:
    """Start a decoupled round with all replicas that can take part, once enough of them have made their steps."""
    ready = [n for n, replica in run.live.items() if _can_join_round(run, replica, round)]
    due = [n for n in ready if _has_reached_next_round(run, run.live[n])]
    if len(due) <= run.exchange.quorum(len(run.live)) and not any(
        (n, round, False) in run.expired_round_waits for n in due
    ):
        return None
    return _begin(run, round, ready)


def _can_join_round(run: RunState, replica: ReplicaState, round: int) -> bool:
    """Return whether a replica can take part in a decoupled round, with the weights after its present orders."""
    joins = replica.rounds == round and replica.open_round is None and run.can_save(replica)
    return joins and replica.phase in ("idle", "run", "evaluate", "commit", "settle")


def _open_prefetch_links(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Let a group whose members have all settled the previous round send prefetched parts."""
    round, live = replica.rounds, run.live
    if replica.broken or replica.phase == "link" or replica.open_round:
        return None
    if round not in run.groups:
        return _draw(run, round)
    members = [n for n in _group(run.groups[round], replica.number) if n in live]
    away = [n for n in members if live[n].rounds != round or live[n].broken or live[n].open_round]
    if len(members) == 1 or away or any(live[n].phase == "link" for n in members):
        return None
    links = _links(run, round, members)
    if {member_link.id for member_link in links} <= run.edges_with_open_prefetch.get(round, frozenset()):
        return None
    generations = [live[n].generation for n in members]
    return d.OpenPrefetchLinks(round=round, members=members, generations=generations, links=links)


def _draw(run: RunState, round: int) -> d.DrawGroups:
    groups = run.exchange.groups(round, list(run.live), run.started.seed)
    return d.DrawGroups(round=round, groups=[list(group) for group in groups])


def _catch_up(replica: ReplicaState, round: int, ahead: list[ReplicaState]) -> d.Adopt | None:
    """Let a replica copy one of those ``ahead``, which settle a round without it; return None if none can be copied."""
    if any(other.can_be_copied for other in ahead):
        return d.Adopt(replica=replica.number, reason=f"others settled round {round} without it")
    return None


def _group(groups: tuple[ReplicaGroup, ...], replica: int) -> ReplicaGroup:
    """Return the group of ``replica``; replicas that came after the draw are alone."""
    return next((group for group in groups if replica in group), (replica,))


def _can_reach_round(run: RunState, replica: ReplicaState) -> bool:
    idle = _is_idle(run, replica) and not is_round_due(run, replica)
    return not (idle and next_block(run, replica) is None)


def _links(run: RunState, round: int, members: list[int]) -> list[d.MemberLink]:
    """Return links between all nodes of each stage, named by the generations at their ends."""
    links = []
    for stage in run.replicas[members[0]].arrangement.stages:
        nodes = [(run.replicas[n].arrangement.nodes(stage)[0], run.replicas[n]) for n in members]
        for index, (low, own) in enumerate(nodes):
            for high, other in nodes[index + 1 :]:
                ends = f"{low}.g{own.generation}-{high}.g{other.generation}"
                at = [run.workers[replica.holders[node]].at for replica, node in ((own, low), (other, high))]
                links.append(link(f"r{round}:{ends}", low, at[0], high, at[1]))
    return links


def _settle(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """End a round with all remaining members or, after a timeout, with a consistent subset."""
    open_round, live = replica.open_round, run.live
    assert open_round is not None
    members = [
        n
        for n in open_round.members
        if n in live and (m := live[n].open_round) is not None and m.round == open_round.round
    ]
    if run.exchange.decoupled:
        return _settle_decoupled(run, replica, members)
    if run.exchange.synchronised:
        rest = [live[n] for n in open_round.members if n in live and n not in members]
        if ahead := [r for r in rest if r.rounds > open_round.round and not r.is_stateless]:
            return _catch_up(replica, open_round.round, ahead)
    excluded = excluded_replicas(run)
    members = [n for n in _members_without_rejections(run, members) if n not in excluded] or [replica.number]
    if replica.number not in members:  # the others continue first, without its update
        return None
    ready = [n for n in members if _is_ready_to_settle(run, live[n])]
    late = any((n, open_round.round, True) in run.expired_round_waits for n in members)
    if late and ready:
        members = _all_received(run, ready)
    elif ready != members or _all_received(run, members) != members:
        return None
    equivocating = equivocating_replicas(run, members)
    members = [n for n in members if n not in equivocating.left_out] or [replica.number]
    excluded = {n: why for n, why in excluded.items() if n in open_round.members and n not in members}
    coefficients, rivals = settle_weights(run, open_round.round, members)
    return d.Settle(
        round=open_round.round,
        members=members,
        generations=[live[n].generation for n in members],
        left_out={**equivocating.left_out, **excluded},
        byzantine=sorted({*equivocating.byzantine, *excluded}),
        counted=coefficients,
        rivals=rivals,
    )


def _settle_decoupled(run: RunState, replica: ReplicaState, members: list[int]) -> d.Decision | None:
    """Let the ready members of a decoupled round settle; the first ones determine the updates that count.

    :param members: the present members that have not settled it
    """
    open_round, live = replica.open_round, run.live
    assert open_round is not None
    round = open_round.round
    late, ahead = (replica.number, round, True) in run.expired_round_waits, _ahead_of(run, round)
    weights = dict(open_round.contributors)
    if not weights or (late and not ahead):  # those that settled it first may be lost, with their result
        weights = _contributors(run, replica, members, late)
    ready = [
        n
        for n in members
        if _is_ready_to_settle(run, live[n]) and all(live[n].has_received(sender) for sender in weights.keys() - {n})
    ]
    if not weights or replica.number not in ready:
        return _catch_up(replica, round, ahead) if late and ahead else None
    return d.Settle(
        round=round,
        members=ready,
        generations=[live[n].generation for n in ready],
        counted=dict.fromkeys(ready, weights),
        contributors=sorted(weights),
    )


def _ahead_of(run: RunState, round: int) -> list[ReplicaState]:
    return [other for other in run.live.values() if other.settled_rounds > round and not other.is_stateless]


def _contributors(run: RunState, replica: ReplicaState, members: list[int], late: bool) -> dict[int, float]:
    """Return the weights of the updates that all their senders have received; empty while they are too few.

    :param late: whether the replica has waited long enough for others, and may settle alone
    """
    senders = _all_received(run, _members_without_rejections(run, members), keep=replica.number)
    assert replica.open_round is not None
    ends_early = replica.step < replica.open_round.settle_at  # it has no more samples, so it can wait for all
    others_needed = len(members) - 1 if ends_early else run.exchange.quorum(len(members))
    if late:
        senders = senders if replica.number in senders else [replica.number]
    elif replica.number not in senders or len(senders) <= others_needed:
        return {}
    rounds = {n: open_round for n in senders if (open_round := run.live[n].open_round) is not None}
    return run.exchange.contribution_weights({n: open_round.inner for n, open_round in rounds.items()})


def _members_without_rejections(run: RunState, members: list[int]) -> list[int]:
    """Return a subset of ``members`` in which no member rejected another's update.

    Members in conflict with most others are removed first, then those rejected by most. A member that rejects everyone
    is excluded like one rejected by everyone.
    """
    rejections = {
        n: {of for _, of in open_round.rejected} for n in members if (open_round := run.live[n].open_round) is not None
    }
    while any(rejections[n] for n in members):
        rejected = {n: sum(n in rejections[member] for member in members) for n in members}
        conflicts = {n: sum(n in rejections[member] or member in rejections[n] for member in members) for n in members}
        worst = max(members, key=lambda n: (conflicts[n], rejected[n], n))
        if not conflicts[worst]:
            break
        members = [n for n in members if n != worst]
    return members


def _all_received(run: RunState, members: list[int], keep: int | None = None) -> list[int]:
    """Return a subset of ``members`` that have all received each other's updates; those that lack most leave first, and
    the member ``keep`` last.

    Members whose reports are compared or weighted must also have reported their own update.
    """
    while True:
        required = {n: [other for other in members if other != n or _reports_own(run, n)] for n in members}
        lacks = {n: sum(not _has_received(run, n, other) for other in required[n]) for n in members}
        worst = max(members, key=lambda n: (lacks[n] > 0 and n != keep, lacks[n], n))
        if not lacks[worst] or len(members) == 1:
            return members
        members = [n for n in members if n != worst]


def _has_received(run: RunState, first: int, second: int) -> bool:
    """Return whether two replicas have received each other's updates at every stage."""
    return run.replicas[first].has_received(second) and run.replicas[second].has_received(first)


def _reports_own(run: RunState, replica: int) -> bool:
    """Return whether the members of its round report what they received, for comparison or weighting."""
    open_round = run.replicas[replica].open_round
    return open_round is not None and (
        run.exchange.weighing is not None or run.exchange.detects_equivocation(len(open_round.members))
    )
