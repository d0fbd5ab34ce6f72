"""Decisions on slow parts: report them, hand a slow worker's stage to a spare, route around a slow link. Pure.

A change is made if it pays. The thresholds are planaria's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from planaria.control.facts import decisions as d
from planaria.control.slowness.edges import flaky_edges, slow_edges, slow_sides, travel_times
from planaria.control.slowness.slow_part import Blamed, SlowPart
from planaria.control.slowness.workers import SLOW_FACTOR, slow_data, slow_workers
from planaria.control.spares import assign_spares, is_slow
from planaria.control.state.gauges import Gauges, NodeGauge
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState

MIN_GAIN_PER_COST = 2.0
"""minimum ratio of the time saved by a handover to its cost"""
MIN_S_BETWEEN_HANDOVERS = 30.0
"""seconds of training between two actions"""


def diagnose(run: RunState, replica: ReplicaState) -> d.SlowPartFound | d.Cleared | None:
    """Return the next finding about a replica: something is slow, or no longer slow."""
    if run.started.diagnose == "off":
        return None
    gauges = run.gauges.of(replica.holders)
    if not gauges:
        return None
    blamed = frozenset(key for key in run.blamed if set(key[1]) <= replica.arrangement.stage.keys())
    hosts = tuple((node, run.workers[gauge.worker].host) for node, gauge in sorted(gauges.items()))
    slow_parts = run.gauges.cached(find_slow_parts, hosts, tuple(run.started.stage_work), blamed)
    step = max(gauge.last.step for gauge in gauges.values())
    for key in sorted(blamed - {(verdict.fault, verdict.nodes) for verdict in slow_parts}):
        return d.Cleared(replica=replica.number, step=step, fault=run.blamed[key].fault, nodes=list(key[1]))
    for verdict in slow_parts:
        if (verdict.fault, verdict.nodes) not in blamed:
            workers = [replica.holders[node] for node in verdict.nodes if node in replica.holders]
            fields = verdict._replace(nodes=list(verdict.nodes))._asdict()  # type: ignore[arg-type]
            return d.SlowPartFound(replica=replica.number, step=step, workers=workers, **fields)
    return None


def find_slow_parts(
    gauges: Gauges,
    hosts: Sequence[tuple[int, str]],
    work: Sequence[float],
    blamed: Blamed,
) -> tuple[SlowPart, ...]:
    """Return the slow parts among the nodes in ``hosts`` (node, its worker's machine).

    :param work: work of a pass, by stage; empty if block stages are alike.
    :param blamed: faults already reported, by (kind, nodes).
    """
    own = {node: gauges.nodes[node] for node, _ in hosts}
    machines = dict(hosts)
    slow = (*slow_workers(own, work, blamed, machines), *slow_data(own, blamed))
    edges = travel_times(own, machines)
    slow_pairs, recently_slow = slow_edges(edges, blamed)
    return (
        *slow,
        *slow_sides(slow_pairs, recently_slow, edges),
        *flaky_edges(gauges, own, edges, slow_pairs, blamed),
    )


def hand_over_slow_stage(run: RunState, replica: ReplicaState) -> d.HandOverSlowStage | None:
    """Return the decision that the next slow worker hands its stage to a spare, or None if no handover pays off."""
    if run.started.diagnose != "act" or run.stopping or run.allocation.done or replica.open_round:
        return None
    gauges = run.gauges.of(replica.holders)
    if not gauges or _too_soon(run):
        return None
    nodes = _nodes_to_replace(run, replica)
    if not nodes:
        return None
    step_s, cost = max(gauge.step_s for gauge in gauges.values()), run.gauges.linking_s
    predicted = step_s * remaining_share(gauges, nodes)
    if (step_s - predicted) * (run.started.steps - replica.step) <= MIN_GAIN_PER_COST * cost * len(nodes):
        return None
    return d.HandOverSlowStage(
        replica=replica.number,
        step=replica.step,
        node=nodes[0],
        worker=replica.holders[nodes[0]],
        step_s=step_s,
        predicted_s=predicted,
        cost_s=cost,
    )


def reroute(run: RunState, replica: ReplicaState) -> d.Replan | d.Reroute | None:
    """Search for a schedule with routes around new slow links, and use it if that pays."""
    if run.started.diagnose != "act" or not run.started.arrangement or run.stopping or run.allocation.done:
        return None
    if replica.vacant or replica.open_round:
        return None
    avoided = {(link.source, link.target) for link in replica.slow_links}
    slow = {nodes: blamed.seconds for (fault, nodes), blamed in run.blamed.items() if fault == "slow link"}
    if slow.keys() <= avoided:
        return _reroute_if_it_pays(run, replica)
    new = [d.SlowLink(source=a, target=b, seconds=seconds) for (a, b), seconds in slow.items() if (a, b) not in avoided]
    return d.Replan(replica=replica.number, nodes=sorted(replica.holders), links=[*replica.slow_links, *new])


def _reroute_if_it_pays(run: RunState, replica: ReplicaState) -> d.Reroute | None:
    """Return the change to the last plan found if it saves more than it costs in the remaining steps."""
    candidate, cost = replica.candidate_plan, run.gauges.linking_s
    steps_left = run.started.steps - replica.step
    if candidate is None or (candidate.before_s - candidate.step_s) * steps_left <= MIN_GAIN_PER_COST * cost:
        return None
    return d.Reroute(
        replica=replica.number,
        step=replica.step,
        before_s=candidate.before_s,
        predicted_s=candidate.step_s,
        cost_s=cost,
    )


def _nodes_to_replace(run: RunState, replica: ReplicaState) -> list[int]:
    """Return the nodes of slow workers that still need a replacement, at most one per spare that was not slow."""
    blamed = {node for fault, nodes in run.blamed if fault in ("slow worker", "slow host") for node in nodes}
    nodes = [n for n, worker in sorted(replica.holders.items()) if n in blamed and not run.workers[worker].slow]
    taking = assign_spares(run, replica, nodes) if nodes else {}
    return [node for node in nodes if node in taking and not is_slow(run, taking[node])]


def remaining_share(gauges: Mapping[int, NodeGauge], nodes: Sequence[int]) -> float:
    """Return the share of a step's time that remains if ``nodes`` return to their initial speed.

    Nodes that were always slow count with the others' median: a pipeline is as fast as its slowest stage.
    """
    others = {node: gauge for node, gauge in gauges.items() if node not in nodes}
    usual = median([gauge.busy_s for gauge in others.values() if gauge.last.stage] or [0.0])
    busy_s_after = []
    for gauge in (gauges[node] for node in nodes):
        share = gauge.past_s / gauge.pass_s if gauge.pass_s > 0 else 1.0
        busy_s_after.append(gauge.busy_s * share if share < 1 / SLOW_FACTOR else usual)
    busiest = max(gauge.busy_s for gauge in gauges.values())
    busiest_after = max(*busy_s_after, *(gauge.busy_s for gauge in others.values()))
    return min(1.0, busiest_after / busiest) if busiest > 0 else 1.0


def _too_soon(run: RunState) -> bool:
    return run.last_handover_at is not None and run.gauges.clock < run.last_handover_at + MIN_S_BETWEEN_HANDOVERS
