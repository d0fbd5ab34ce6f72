"""``apply(state, fact)``: the state of the run after one more event or decision. Pure.

Facts of an older generation, or of a worker that counts as dead, change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatch
from types import MappingProxyType
from typing import Any

from planaria import decisions as d
from planaria import events as e
from planaria.control.state import RunState, WorkerState


@singledispatch
def apply(fact: e.Fact, state: RunState) -> RunState:
    """The state after ``fact``; facts that only inform leave it as it is."""
    return state


@apply.register
def _(fact: e.RunStarted, state: RunState) -> RunState:
    return RunState.start(fact)


@apply.register
def _(fact: e.WorkerJoined, state: RunState) -> RunState:
    state = replace(_set_worker(state, fact.worker, WorkerState(fact.incarnation, "spare", fact.pid)), stillborn=0)
    # With one worker more, the plan that is being looked for may not be needed.
    return replace(state, phase="idle") if state.phase == "replan" else state


@apply.register
def _(fact: e.WorkerLost, state: RunState) -> RunState:
    worker = state.workers.get(fact.worker)
    if worker is None or worker.status == "dead" or worker.incarnation != fact.incarnation:
        return state
    state = _set_worker(state, fact.worker, replace(worker, status="dead"))
    if worker.status == "starting":
        state = replace(state, stillborn=state.stillborn + 1)
    nodes = [n for n, holder in state.holders.items() if holder == fact.worker]
    if not nodes or state.phase == "over":
        return state
    known = _still_known(state)
    origins = {**state.origins, **{n: known[n] for n in nodes if n in known}}
    state = replace(
        state,
        holders=_freeze({n: w for n, w in state.holders.items() if w != fact.worker}),
        origins=_freeze(origins),
        lost=state.lost | {n for n in nodes if n not in origins},
        links=_freeze({p: i for p, i in state.links.items() if not set(p) & set(nodes)}),
        stillborn=0,  # spares may have been given up; a stage is worth trying again
    )
    another = {state.arrangement.stage[node] for node in nodes} & set(state.stateful.stages)
    # The others finish what cannot be taken back; a last save begins anew if another node can do the lost one's part.
    if state.phase == "commit" or (state.phase == "save" and state.cannot and not another):
        return _reported(state, fact.worker)
    return replace(state, phase="idle", waiting=frozenset())


@apply.register
def _(fact: e.Linked, state: RunState) -> RunState:
    if not _current(state, fact, "link"):
        return state
    state = replace(state, origins=_without(state.origins, fact.node), lost=state.lost - {fact.node})
    return _reported(state, fact.worker)


@apply.register
def _(fact: e.EdgeBroken, state: RunState) -> RunState:
    if fact.generation != state.generation or fact.worker not in state.holders.values():
        return state
    pair = (min(fact.node, fact.peer), max(fact.node, fact.peer))
    return replace(state, suspects=state.suspects | {pair})


@apply.register
def _(fact: e.GraceExpired, state: RunState) -> RunState:
    if fact.generation != state.generation or not state.suspects or state.phase == "over":
        return state
    state = replace(state, links=_freeze({p: i for p, i in state.links.items() if p not in state.suspects}))
    # A commit does not use edges and must not be torn; it ends first.
    return state if state.phase in ("commit", "save") else replace(state, phase="idle", waiting=frozenset())


@apply.register
def _(fact: e.StageReady, state: RunState) -> RunState:
    if fact.step != state.step or not (_current(state, fact, "run") or _current(state, fact, "evaluate")):
        return state
    return _reported(state, fact.worker)


@apply.register
def _(fact: e.StageCommitted, state: RunState) -> RunState:
    return _reported(state, fact.worker) if _current(state, fact, "commit") and fact.step == state.step else state


@apply.register
def _(fact: e.StageSaved, state: RunState) -> RunState:
    return _reported(state, fact.worker) if _current(state, fact, "save") and fact.step == state.step else state


@apply.register
def _(fact: e.WorkerFailed, state: RunState) -> RunState:
    return replace(state, failed=state.failed or f"worker {fact.worker} (stage {fact.stage}): {fact.detail}")


@apply.register
def _(fact: e.StopRequested, state: RunState) -> RunState:
    return replace(state, stopping=fact.reason)


@apply.register
def _(fact: e.IntervalChosen, state: RunState) -> RunState:
    return replace(state, save_every=fact.steps)


@apply.register
def _(fact: e.Replanned, state: RunState) -> RunState:
    state = replace(state, detour=fact)
    return replace(state, phase="idle") if state.phase == "replan" else state


@apply.register
def _(fact: d.Replan, state: RunState) -> RunState:
    return replace(state, phase="replan", waiting=frozenset())


@apply.register
def _(fact: d.Spawn, state: RunState) -> RunState:
    return _set_worker(state, fact.worker, WorkerState(fact.incarnation, "starting"))


@apply.register
def _(fact: d.Form, state: RunState) -> RunState:
    workers = dict(state.workers)
    origins, ages = dict(state.origins), dict(state.ages)
    for member in fact.members:
        workers[member.worker] = replace(workers[member.worker], status="member")
        if isinstance(member.source, d.Fresh | d.Load):
            origins[member.node] = member.source
        if not isinstance(member.source, d.Keep):
            ages[member.node] = 0
    return replace(
        state,
        phase="link",
        generation=fact.generation,
        step=fact.step,
        formed=fact.step,
        attempts=state.attempts + 1,
        workers=_freeze(workers),
        holders=_freeze({m.node: m.worker for m in fact.members}),
        skipped=frozenset(state.arrangement.stage) - {m.node for m in fact.members},
        origins=_freeze(origins),
        ages=_freeze(ages),
        lost=frozenset() if fact.outcome == "rolled back" else state.lost,
        links=_freeze({(link.low, link.high): link.id for link in fact.links}),
        suspects=frozenset(),
        waiting=frozenset(m.worker for m in fact.members),
        evaluated=min(state.evaluated, fact.step),
        saved=min(state.saved, fact.step),
    )


@apply.register
def _(fact: d.RunStep, state: RunState) -> RunState:
    waiting = frozenset(state.holders.values())
    return replace(state, phase="run" if fact.mode == "train" else "evaluate", waiting=waiting)


@apply.register
def _(fact: d.Commit, state: RunState) -> RunState:
    state = replace(
        state,
        phase="commit",
        waiting=frozenset(state.holders.values()),
        lost=state.lost | state.origins.keys(),  # of nodes where nobody stands: what they were to begin from is past
        origins=_freeze({}),
    )
    rested = state.rested | state.skipped
    if state.skipped:  # copies from and at the skipped nodes rest; nobody's count as older for it
        return replace(state, rested=rested)
    # A copy that has missed steps may have been half renewed before: whoever keeps one begins to count anew.
    anew = {node for pair in state.settings.pairs if rested & set(pair) for node in pair}
    ages = {node: 1 if node in anew else age + 1 for node, age in state.ages.items()}
    return replace(state, ages=_freeze(ages), rested=frozenset())


@apply.register
def _(fact: d.Save, state: RunState) -> RunState:
    there = state.stateful
    keepers = {state.holders[there.nodes(stage)[0]] for stage in there.stages}
    return replace(state, phase="save", waiting=frozenset(keepers))


@apply.register
def _(fact: d.Seal, state: RunState) -> RunState:
    if fact.partial:
        return replace(state, phase="idle", saved=fact.step)
    return replace(state, phase="idle", saved=fact.step, durable=d.Load(folder=fact.folder), durable_step=fact.step)


@apply.register
def _(fact: d.Cannot, state: RunState) -> RunState:
    return replace(state, cannot=fact.reason, phase="idle", waiting=frozenset(), saved=-1)


@apply.register
def _(fact: d.Finish, state: RunState) -> RunState:
    return replace(state, phase="over", waiting=frozenset())


def _still_known(state: RunState) -> Mapping[int, d.Source]:
    """Where the nodes' present state can be had exactly: as long as no step is committed, whence the run started."""
    if state.step != state.settings.first_step or state.phase == "commit":
        return {}
    return RunState.start(state.settings).origins


def _current(state: RunState, fact: Any, phase: str) -> bool:
    """Does this report answer the present phase of the present generation?"""
    return state.phase == phase and fact.generation == state.generation and fact.worker in state.waiting


def _reported(state: RunState, worker: str) -> RunState:
    """One report less to wait for; the last one ends the phase (a save ends with its seal)."""
    state = replace(state, waiting=state.waiting - {worker})
    if state.waiting or state.phase in ("run", "save"):
        return state
    if state.phase == "commit":
        return replace(state, phase="idle", step=state.step + 1, attempts=0)
    if state.phase == "evaluate":
        return replace(state, phase="idle", evaluated=state.step)
    return replace(state, phase="idle")


def _set_worker(state: RunState, name: str, worker: WorkerState) -> RunState:
    return replace(state, workers=_freeze({**state.workers, name: worker}))


def _freeze(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(mapping)


def _without(mapping: Mapping[int, d.Source], key: int) -> Mapping[int, d.Source]:
    return _freeze({k: v for k, v in mapping.items() if k != key})
