"""What is done about slow workers and links: hand a stage to a spare, or go around, where that pays. Pure.

The rule: the seconds that are saved until the run's end are more than twice those that handing over takes. Nothing is
handed to and fro: there are 30 seconds of training between two such deeds, a worker is relieved once, and from then on
it is the last of the spares, who takes over only what would else be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from planaria.control.slow_workers import SLOW
from planaria.control.spares import is_slow, taken_over
from planaria.record import decisions as d
from planaria.record.gauges import Gauge
from planaria.record.replica import ReplicaState
from planaria.record.state import RunState

PAYS = 2.0
"""times what handing over costs: what it has to save"""
PAUSE_S = 30.0
"""of training, between two deeds"""


def steer(run: RunState, replica: ReplicaState) -> d.Relieve | None:
    """A slow worker that is to hand its stage to a spare now."""
    if run.settings.diagnose != "act" or run.stopping or run.allotment.done or replica.meeting:
        return None
    gauges = run.gauges.of(replica.holders)
    if not gauges or _too_soon(run):
        return None
    nodes = _slow(run, replica)
    if not nodes:
        return None
    step_s, cost = max(gauge.step_s for gauge in gauges.values()), run.gauges.linking_s
    predicted = step_s * after(gauges, nodes)
    if (step_s - predicted) * (run.settings.steps - replica.step) <= PAYS * cost * len(nodes):
        return None
    return d.Relieve(
        replica=replica.number,
        step=replica.step,
        node=nodes[0],
        worker=replica.holders[nodes[0]],
        step_s=step_s,
        predicted_s=predicted,
        cost_s=cost,
    )


def reroute(run: RunState, replica: ReplicaState) -> d.Replan | d.Reroute | None:
    """On a schedule: look for routes around links that have become slow, and take them if that pays."""
    if run.settings.diagnose != "act" or not run.settings.arrangement or run.stopping or run.allotment.done:
        return None
    if replica.vacant or replica.meeting:
        return None
    known = {(way.source, way.target) for way in replica.ways}
    slow = {nodes: blamed.seconds for (fault, nodes), blamed in run.blamed.items() if fault == "slow link"}
    if slow.keys() <= known:
        return _taken(run, replica)
    new = [d.SlowLink(source=a, target=b, seconds=seconds) for (a, b), seconds in slow.items() if (a, b) not in known]
    return d.Replan(replica=replica.number, nodes=sorted(replica.holders), ways=[*replica.ways, *new])


def _taken(run: RunState, replica: ReplicaState) -> d.Reroute | None:
    """The plan that was found last, if it pays."""
    offered, cost = replica.offered, run.gauges.linking_s
    left = run.settings.steps - replica.step
    if offered is None or (offered.before_s - offered.step_s) * left <= PAYS * cost:
        return None
    return d.Reroute(
        replica=replica.number,
        step=replica.step,
        before_s=offered.before_s,
        predicted_s=offered.step_s,
        cost_s=cost,
    )


def _slow(run: RunState, replica: ReplicaState) -> list[int]:
    """Nodes whose workers are slow and have not been relieved before, as far as there are spares that were not slow."""
    blamed = {node for fault, nodes in run.blamed if fault in ("slow worker", "slow host") for node in nodes}
    nodes = [n for n, worker in sorted(replica.holders.items()) if n in blamed and not run.workers[worker].slow]
    taking = taken_over(run, replica, nodes) if nodes else {}
    return [node for node in nodes if node in taking and not is_slow(run, taking[node])]


def after(gauges: Mapping[int, Gauge], nodes: Sequence[int]) -> float:
    """The share of a step's time that is left when ``nodes`` are as fast as at first, or, if they have been slow since
    then, as the median of the others: a pipeline goes by its slowest stage."""
    others = {node: gauge for node, gauge in gauges.items() if node not in nodes}
    usual = median([gauge.busy_s for gauge in others.values() if gauge.last.stage] or [0.0])
    relieved = []
    for gauge in (gauges[node] for node in nodes):
        share = gauge.past_s / gauge.pass_s if gauge.pass_s > 0 else 1.0
        relieved.append(gauge.busy_s * share if share < 1 / SLOW else usual)
    busiest = max(gauge.busy_s for gauge in gauges.values())
    left = max(*relieved, *(gauge.busy_s for gauge in others.values()))
    return min(1.0, left / busiest) if busiest > 0 else 1.0


def _too_soon(run: RunState) -> bool:
    return run.relieved is not None and run.gauges.clock < run.relieved + PAUSE_S
