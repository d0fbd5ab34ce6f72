"""Replicas that lie: found by what all say they have heard, or by what all have refused, and left out. Pure.

All-reduced replicas settle a step at once and tell what they have heard with the result. If that differs, the step is
made again without those who are found out: it has not been committed. Replicas that meet now and then tell it before
they settle; whoever is found out is not of the party. What follows from what is ``exchange/equivocation.py``. An offer
that is of no use is refused by everybody at once, and needs no decision; whose are again and again is in
``record/suspicion.py``, and so it is with rounds. Who is sent away for it is in ``control/sending_away.py``.
"""

from __future__ import annotations

from collections.abc import Collection

from planaria.exchange.equivocation import Findings, Heard, findings, joined
from planaria.record import decisions as d
from planaria.record.replica import ReplicaState
from planaria.record.state import RunState
from planaria.record.suspicion import distrusted


def remembered(run: RunState) -> dict[int, str]:
    """Replicas whose offers were of no use so often that rounds go on without them, and why."""
    return Findings(useless=run.suspicion.standing(run.rule).useless).left_out


def left_out(run: RunState) -> dict[int, str]:
    """Replicas without which the all-reduced step that comes next, or is under way, is made, and why."""
    return run.suspicion.standing(run.rule).left_out if run.rule.interval == 0 else {}


def disagreement(run: RunState, replica: ReplicaState) -> d.LeaveOut | d.Finish | None:
    """All have finished their part of a step of all-reduced replicas: have they gone by the same gradients?"""
    if not replica.heard:
        return None
    found = run.suspicion.examine(_heard_in_step(replica), run.rule)
    if not found.least:
        return None
    if wrong := run.suspicion.raised(found.all).unbearable(run.rule):
        return d.Finish(outcome="failed", reason=wrong)
    return d.LeaveOut(
        replica=replica.number,
        generation=replica.generation,
        step=replica.step,
        liars=list(found.liars),
        disputes=list(found.disputes),
    )


def _heard_in_step(replica: ReplicaState) -> Heard:
    """Member → member → digests of all stages."""
    nodes = replica.held
    columns = zip(*(nodes.nodes(stage) for stage in nodes.stages), strict=False)
    heard = ((replica.heard.get(replica.holders[node], {}) for node in column) for column in columns)
    return {member: joined(of_stages) for member, of_stages in enumerate(heard)}


def suspects(run: RunState, party: Collection[int]) -> Findings:
    """Of replicas that are about to settle a round together: who has told others different things."""
    if not run.rule.witnessed(len(party)):
        return Findings()
    heard = {}
    for number in party:
        replica, by_node = run.replicas[number], dict[int, dict[int, str]]()
        assert replica.meeting is not None
        for (node, member), digest in replica.meeting.heard.items():
            by_node.setdefault(node, {})[member] = digest
        nodes = (replica.arrangement.nodes(stage)[0] for stage in replica.arrangement.stages)
        heard[number] = joined(by_node.get(node, {}) for node in nodes)
    return findings(heard, party, distrusted(run.rule))
