"""When replicas meet, and which: rounds of the exchange without a barrier for all. Pure.

Who meets whom in a round is drawn when the first replica comes to it, of those that are there. A member waits for the
others of its group, but only so long (``exchange.patience_s``, on the controller's clock): then those that are there
meet without the rest, a single one by itself. What is made of a round comes from offers that all who settle it together
have heard of one another, so a member lost on the way leaves no half-made rounds.
"""

from __future__ import annotations

from collections.abc import Collection

from planaria.control import decisions as d
from planaria.control.members import link
from planaria.control.replica import Group, ReplicaState
from planaria.control.staffing import can_be_copied, settled
from planaria.control.state import RunState
from planaria.control.witnesses import counted, remembered, suspects

LENIENCE = 50
"""steps that a replica may lag behind before others help it, where no rounds give a measure"""
LENIENCE_IN_TROUBLE = 1
"""the same, once somebody has been lost or has joined"""


def due(run: RunState, replica: ReplicaState) -> bool:
    """Has the replica made its steps since the last round?"""
    if replica.meeting or run.settings.replicas == 1:
        return False
    rule, config = run.rule, run.settings.exchange
    own = config.inner[replica.number : replica.number + 1]  # nobody has one for replicas that come later
    every = own[0] if rule.interval and own else rule.interval
    return bool(every) and replica.inner >= (every or 0)


def next_block(run: RunState, replica: ReplicaState) -> int | None:
    """The block of samples of the replica's next step; None if nothing is left for it."""
    return run.allotment.next_for(replica.number, run.replicas.gone, _lenience(run, replica))


def _lenience(run: RunState, replica: ReplicaState) -> int:
    """Steps that others may lag behind before the replica helps them.

    Many, as long as each has been formed but once: who is a little faster must not make a run differ from the next.
    """
    settings = run.settings
    if replica.number >= settings.replicas:  # it came later, and has no samples of its own
        return 0
    if run.replicas.generation > settings.first_generation + settings.replicas:
        return LENIENCE_IN_TROUBLE
    return 2 * (run.rule.interval or LENIENCE)


def meet(run: RunState, concerned: Collection[ReplicaState]) -> d.Decision | None:
    """The next thing to do about rounds, by these replicas; by all if samples run out, for then one may not come to a
    round for which others wait."""
    if run.settings.replicas == 1:
        return None
    if not run.allotment.plenty:
        concerned = run.live.values()
    rule = run.rule
    for replica in _with_groups(run, concerned) if rule.prefetches else concerned:
        decision: d.Decision | None = None
        if _to_settle(run, replica):
            decision = _settle(run, replica)
        elif _ready(run, replica) and not run.stopping:
            decision = _gather(run, replica)
        elif rule.prefetches and not run.stopping:
            decision = _introduce(run, replica)
        if decision is not None:
            return decision
    return None


def _with_groups(run: RunState, replicas: Collection[ReplicaState]) -> list[ReplicaState]:
    """These replicas and those that they are to meet, in order: one that has come to a round introduces nobody."""
    groups = (_group(run.groups.get(replica.rounds, ()), replica.number) for replica in replicas)
    numbers = {number for group in groups for number in group} - run.replicas.gone
    return [run.replicas[number] for number in sorted(numbers)]


def behind(run: RunState) -> frozenset[int]:
    """Replicas that others have settled a round without, and that must not be: they copy one as soon as that can be."""
    if run.settings.replicas == 1 or not run.rule.synchronised:
        return frozenset()
    rounds = {number: settled(replica) for number, replica in run.live.items()}
    latest = max(rounds.values())
    return frozenset(number for number, own in rounds.items() if own < latest)


def waiting(run: RunState, replica: ReplicaState) -> tuple[int, int, bool] | None:
    """Does it wait for others? (replica, round, is it meeting already?) then; None if not, or if for long enough."""
    if run.settings.replicas == 1 or replica.phase == "left":
        return None
    found = None
    if replica.meeting and _to_settle(run, replica):
        found = replica.number, replica.meeting.round, True
    elif _ready(run, replica):
        found = replica.number, replica.rounds, False
    return None if found in run.late else found


def quorate(run: RunState, replica: ReplicaState) -> bool:
    """Has it heard as many in its round as are enough for it, if the rest is silent? Then it need not wait long."""
    if replica.meeting is None:
        return False
    others = [n for n in replica.meeting.members if n != replica.number]
    enough = run.rule.quorum(len(others) + 1)
    return enough < len(others) and sum(map(replica.has_heard, others)) >= enough


def _at_rest(run: RunState, replica: ReplicaState) -> bool:
    return replica.phase == "idle" and run.can_save(replica)


def _to_settle(run: RunState, replica: ReplicaState) -> bool:
    """Has the replica come to the end of its round, or as close to it as it will?"""
    if not replica.meeting or not _at_rest(run, replica):
        return False
    return replica.step >= replica.meeting.settle_at or bool(run.stopping) or next_block(run, replica) is None


def _ready(run: RunState, replica: ReplicaState) -> bool:
    """Has the replica come to its next round?"""
    return _at_rest(run, replica) and due(run, replica)


def _gather(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Begin the round of a replica that has come to it, once the others of its group have, or are late."""
    rule, round, live = run.rule, replica.rounds, run.live
    if rule.synchronised and (ahead := [r for r in live.values() if r.rounds > round and not r.hollow]):
        return _catch_up(replica, round, ahead)
    if round not in run.groups and not rule.synchronised:
        return _draw(run, round)
    group = tuple(live) if rule.synchronised else _group(run.groups[round], replica.number)
    expected = [n for n in group if n in live and live[n].rounds <= round and _will_come(run, live[n])]
    present = [n for n in expected if live[n].rounds == round and _ready(run, live[n])]
    if present != expected and not any((n, round, False) in run.late for n in present):
        return None
    generations = [live[n].generation for n in present]
    if len(present) == 1:
        return d.Settle(round=round, members=present, generations=generations)
    return d.Meet(round=round, members=present, generations=generations, links=_links(run, round, present))


def _introduce(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """Let a group whose members have all settled the round before say ahead what they can."""
    round, live = replica.rounds, run.live
    if replica.broken or replica.phase == "link" or replica.meeting:
        return None
    if round not in run.groups:
        return _draw(run, round)
    members = [n for n in _group(run.groups[round], replica.number) if n in live]
    away = [n for n in members if live[n].rounds != round or live[n].broken or live[n].meeting]
    if len(members) == 1 or away or any(live[n].phase == "link" for n in members):
        return None
    links = _links(run, round, members)
    if {known.id for known in links} <= run.introduced.get(round, frozenset()):
        return None
    generations = [live[n].generation for n in members]
    return d.Introduce(round=round, members=members, generations=generations, links=links)


def _draw(run: RunState, round: int) -> d.DrawGroups:
    groups = run.rule.groups(round, list(run.live), run.settings.seed)
    return d.DrawGroups(round=round, groups=[list(group) for group in groups])


def _catch_up(replica: ReplicaState, round: int, ahead: list[ReplicaState]) -> d.Adopt | None:
    """Others settle a round without this replica, or have: it goes on as a copy of one as soon as that can be."""
    if any(can_be_copied(other) for other in ahead):
        return d.Adopt(replica=replica.number, reason=f"others settled round {round} without it")
    return None


def _group(groups: tuple[Group, ...], replica: int) -> Group:
    """The group of ``replica``; who came after the draw is alone."""
    return next((group for group in groups if replica in group), (replica,))


def _will_come(run: RunState, replica: ReplicaState) -> bool:
    """Not if it has no samples left to come to its next round with."""
    resting = _at_rest(run, replica) and not due(run, replica)
    return not (resting and next_block(run, replica) is None)


def _links(run: RunState, round: int, members: list[int]) -> list[d.Link]:
    """Every stage's nodes with one another. A link goes by the generations at its ends: a new one has new links."""
    found = []
    for stage in run.replicas[members[0]].arrangement.stages:
        nodes = [(run.replicas[n].arrangement.nodes(stage)[0], run.replicas[n]) for n in members]
        for place, (low, mine) in enumerate(nodes):
            for high, other in nodes[place + 1 :]:
                ends = f"{low}.g{mine.generation}-{high}.g{other.generation}"
                at = [run.workers[replica.holders[node]].at for replica, node in ((mine, low), (other, high))]
                found.append(link(f"r{round}:{ends}", low, at[0], high, at[1]))
    return found


def _settle(run: RunState, replica: ReplicaState) -> d.Decision | None:
    """End a round: together with all that still take part, or, if that takes too long, with whom it can be."""
    meeting, live = replica.meeting, run.live
    assert meeting is not None
    party = [
        n for n in meeting.members if n in live and (m := live[n].meeting) is not None and m.round == meeting.round
    ]
    if run.rule.synchronised:
        rest = [live[n] for n in meeting.members if n in live and n not in party]
        if ahead := [r for r in rest if r.rounds > meeting.round and not r.hollow]:
            return _catch_up(replica, meeting.round, ahead)
    useless = remembered(run)
    party = [n for n in _accepted(run, party) if n not in useless] or [replica.number]
    if replica.number not in party:  # the others go on first, as if it had said nothing
        return None
    resting = [n for n in party if _to_settle(run, live[n])]
    late = any((n, meeting.round, True) in run.late for n in party)
    if late and resting:
        party = _all_heard(run, resting)
    elif resting != party or _all_heard(run, party) != party:
        return None
    found = suspects(run, party)
    party = [n for n in party if n not in found.left_out] or [replica.number]
    useless = {n: why for n, why in useless.items() if n in meeting.members and n not in party}
    coefficients, rivals = counted(run, meeting.round, party)
    return d.Settle(
        round=meeting.round,
        members=party,
        generations=[live[n].generation for n in party],
        left_out={**found.left_out, **useless},
        liars=sorted({*found.liars, *useless}),
        counted=coefficients,
        rivals=rivals,
    )


def _accepted(run: RunState, party: list[int]) -> list[int]:
    """Of ``party``, those of whom none has refused what another said: who is at odds with most goes first, and of
    several who was refused by most. Who refuses everybody's offer is gone on without, as one whom everybody refuses."""
    told = {n: {of for _, of in meeting.refused} for n in party if (meeting := run.live[n].meeting) is not None}
    while any(told[n] for n in party):
        refused = {n: sum(n in told[other] for other in party) for n in party}
        odds = {n: sum(n in told[other] or other in told[n] for other in party) for n in party}
        worst = max(party, key=lambda n: (odds[n], refused[n], n))
        if not odds[worst]:
            break
        party = [n for n in party if n != worst]
    return party


def _all_heard(run: RunState, party: list[int]) -> list[int]:
    """Of ``party``, those that have all heard of one another: who lacks most goes first.

    Where several compare what they have heard, or weigh it, each has to tell what it has said, too.
    """
    while True:
        lacks = {n: sum(not _heard(run, n, other) for other in party if other != n or _tells(run, n)) for n in party}
        worst = max(party, key=lambda n: (lacks[n], n))
        if not lacks[worst] or len(party) == 1:
            return party
        party = [n for n in party if n != worst]


def _heard(run: RunState, one: int, other: int) -> bool:
    """Have two replicas heard of each other, at every stage?"""
    return run.replicas[one].has_heard(other) and run.replicas[other].has_heard(one)


def _tells(run: RunState, replica: int) -> bool:
    """Do the members of its round tell what they have heard, so that it is compared, or weighed?"""
    meeting = run.replicas[replica].meeting
    return meeting is not None and (run.rule.weighing is not None or run.rule.witnessed(len(meeting.members)))
