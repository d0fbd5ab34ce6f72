"""``apply`` for a new generation: where a replica stands once it is formed, and who goes back with it. Pure."""

from __future__ import annotations

from dataclasses import replace

from planaria.record import decisions as d
from planaria.record.fold import freeze, give_up_save, handles, set_workers, with_replica
from planaria.record.memory import Memory
from planaria.record.replica import ReplicaState
from planaria.record.roster import Status
from planaria.record.state import RunState
from planaria.record.waiting import Waiting


@handles
def _(fact: d.Form, run: RunState) -> RunState:
    replica = _formed(run, run.replicas[fact.replica], fact)
    status: dict[str, Status] = dict.fromkeys(replica.leavers.values(), "spare")
    status |= dict.fromkeys((member.worker for member in fact.members), "member")
    known = run.workers
    run = set_workers(run, {w: replace(known[w], status=s) for w, s in status.items() if known[w].status != s})
    if fact.outcome == "rolled back":
        unsaved = run.unsaved and replace(run.unsaved, since=-1, rested=True)
        saved, allotment = min(run.saved, run.durable.step), run.allotment.roll_back(fact.replica)
        run = give_up_save(replace(run, allotment=allotment, saved=saved, unsaved=unsaved))
        run = _follow(run, replica)
    elif fact.outcome == "recalled":
        run = give_up_save(replace(run, allotment=run.allotment.recall(fact.replica)))
    return with_replica(run, replica)


def _follow(run: RunState, leader: ReplicaState) -> RunState:
    """One replica has rolled back because nobody has a stage any more. Those that must stay synchronised with it, lack
    the stage too and have settled no more rounds copy it whole: what is left of them may have been rebuilt since."""
    if not run.rule.synchronised:
        return run
    for other in run.live.values():
        if other.number != leader.number and other.rounds <= leader.rounds and other.lost - other.leavers.keys():
            run = with_replica(run, void(other))
    return run


def void(replica: ReplicaState) -> ReplicaState:
    """The states of all its nodes are to be copied from another replica."""
    nodes = frozenset(replica.arrangement.stage)
    return replace(replica, lost=nodes, leavers=freeze({}), origins=freeze({}), meeting=None)


def _formed(run: RunState, replica: ReplicaState, form: d.Form) -> ReplicaState:
    rebuilt = {m.node for m in form.members if isinstance(m.source, d.Rebuild)}
    origins, ages = dict(replica.origins), dict(replica.ages)
    for member in form.members:
        if isinstance(member.source, d.Fresh | d.Load | d.Recall):
            origins[member.node] = member.source
        if not isinstance(member.source, d.Keep):
            ages[member.node] = 0
    nodes = {member.node for member in form.members}
    donors = {n for m in form.members if isinstance(m.source, d.Rebuild) for n in m.source.donors}
    holders, handing = form.holders, form.handing
    leavers = {n: w for n, w in {**replica.leavers, **handing}.items() if holders.get(n) != w and not form.goes_back}
    again = {node for node, worker in replica.leavers.items() if holders.get(node) == worker}
    return replace(
        replica,
        phase="link",
        generation=form.generation,
        step=form.step,
        formed=form.step,
        attempts=replica.attempts + (form.outcome != "handed over"),  # that begins where all is well
        holders=freeze(holders),
        skipped=frozenset(replica.arrangement.stage) - nodes,
        origins=freeze(origins),
        ages=freeze(ages),
        lost=frozenset(rebuilt) if form.goes_back else (replica.lost - again) | handing.keys(),
        lenders=freeze({donor: run.holders[donor] for donor in sorted(donors - replica.arrangement.stage.keys())}),
        leavers=freeze(leavers),
        links=freeze({(link.low, link.high): link.id for link in form.links}),
        over=freeze({(link.low, link.high): link.over for link in form.links if link.over}),
        suspects=frozenset(),
        stalled=(),
        routes=form.routes,
        waiting=Waiting(m.worker for m in form.members),
        evaluated=min(replica.evaluated, form.step),
        rounds=form.rounds,
        inner=form.inner,
        memory=replica.memory and _remembered(replica.memory, form),
    )


def _remembered(memory: Memory, form: d.Form) -> Memory:
    """What is remembered once ``form`` is linked."""
    if form.outcome == "rolled back":
        return memory.void()
    renewed = {m.node: m.source for m in form.members if not isinstance(m.source, d.Keep | d.Recall)}
    restored = {node for node, s in renewed.items() if isinstance(s, d.Rebuild) and s.by == memory.by}
    formed = memory.formed(renewed, restored)
    return formed if all(isinstance(m.source, d.Keep) for m in form.members) else formed.restarted()
