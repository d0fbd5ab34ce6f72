"""``apply`` for what workers measure, and for what is found from it. Pure."""

from __future__ import annotations

from dataclasses import replace

from planaria.record import decisions as d
from planaria.record import events as e
from planaria.record.copied import copied
from planaria.record.fold import concerning, freeze, handles, set_workers
from planaria.record.state import RunState


@handles
def _(fact: e.Gauged, run: RunState) -> RunState:
    replica = run.replica_of(fact.worker)
    if replica is None or replica.generation != fact.generation or replica.holders.get(fact.node) != fact.worker:
        return run
    run = copied(run, gauges=run.gauges.heard(fact))
    # Where something is slow, whether it is time to do something about it goes by the clock that all share.
    return concerning(run, run.live.values() if run.blamed else [replica])


@handles
def _(fact: d.Blamed, run: RunState) -> RunState:
    return replace(run, blamed=freeze({**run.blamed, (fact.fault, tuple(fact.nodes)): fact}))


@handles
def _(fact: d.Cleared, run: RunState) -> RunState:
    left = {key: blamed for key, blamed in run.blamed.items() if key != (fact.fault, tuple(fact.nodes))}
    return replace(run, blamed=freeze(left))


@handles
def _(fact: d.Relieve, run: RunState) -> RunState:
    slow = replace(run.workers[fact.worker], slow=True)
    return set_workers(replace(run, relieved=run.gauges.clock), {fact.worker: slow})
