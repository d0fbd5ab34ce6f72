"""Slow workers, machines, links and data: detect them in measurements, and act if that pays. Pure.

A slow worker hands its stage over to a spare; a slow link is routed around. The thresholds are planaria's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from planaria.control.facts import decisions as d
from planaria.control.facts.slowness_events import SlownessKind
from planaria.control.state.gauges import RECENT, NodeGauge
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState
from planaria.control.worker_assignment import assign_spares, is_slow

HYSTERESIS_FACTOR = 0.7
"""factor on thresholds of parts already blamed, for hysteresis"""

Blamed = frozenset[tuple[str, tuple[int, ...]]]
"""(fault, nodes) already blamed"""


class SlowPart(NamedTuple):
    """A slow part; fields as in :class:`planaria.control.facts.slowness_events.SlowPartFound`."""

    fault: SlownessKind
    nodes: tuple[int, ...]
    seconds: float
    initial_s: float
    peer_median_s: float


def threshold_factor(known_faults: Blamed, fault: SlownessKind, nodes: Iterable[int]) -> float:
    """Return the factor on a threshold: less than 1 if these nodes are already blamed for ``fault``."""
    blamed = any(kind == fault and set(nodes) <= {*of} for kind, of in known_faults)
    return HYSTERESIS_FACTOR if blamed else 1.0


SLOW_FACTOR = 1.5
"""slow worker: multiple of its initial passes and of its peers' median"""
SLOW_FROM_START_FACTOR = 2.0
"""worker that was slow from the start: multiple of its peers' median"""
MIN_PASS_S = 0.02
"""minimum duration of passes considered"""
LATE_BATCH_FACTOR = 3.0
"""late batches: multiple of the initial time"""
MIN_READ_S = 0.02
"""late batches: minimum extra seconds per step"""
MIN_SHARE_OF_STEP = 0.05
"""late batches: minimum share of a step"""


def slow_workers(
    own: Mapping[int, NodeGauge], work: Sequence[float], blamed: Blamed, hosts: Mapping[int, str]
) -> list[SlowPart]:
    """Return workers with slow passes, or their machines; the ends stage is compared only with its own past.

    :param work: work of a pass, by stage; empty if block stages are alike.
    :param hosts: node → its worker's machine.
    """
    judged = {node: gauge for node, gauge in own.items() if len(gauge.recent) == RECENT}
    per_work = {n: g.pass_s / _work(g, work) for n, g in judged.items() if g.last.stage}
    slow, lately = dict[int, SlowPart](), set[int]()
    for node, gauge in judged.items():
        peers = _peers(node, per_work.keys(), hosts)
        usual = median(per_work[peer] for peer in peers) * _work(gauge, work) if peers and node in per_work else 0.0
        if not usual and _all_slower(own, peers or per_work.keys()):
            continue
        limit = _limit(
            gauge.past_s,
            usual,
            min(threshold_factor(blamed, "slow worker", [node]), threshold_factor(blamed, "slow host", [node])),
        )
        if gauge.pass_s > limit:
            slow[node] = SlowPart("slow worker", (node,), gauge.pass_s, gauge.past_s, usual)
        if gauge.last.pass_s > limit:
            lately.add(node)
    return _by_host(slow, lately, hosts, blamed)


def _work(gauge: NodeGauge, work: Sequence[float]) -> float:
    return work[gauge.last.stage] if work else 1.0


def _peers(node: int, blocks: Collection[int], hosts: Mapping[int, str]) -> list[int]:
    """Return the block stages that a node is compared with."""
    candidates = [other for other in blocks if other != node]
    return [other for other in candidates if hosts[other] != hosts[node]] or candidates


def _limit(past: float, usual: float, eased: float) -> float:
    """Return the threshold on passes; ``usual`` is 0 without peers.

    Passes that initially took no time only forward activations and give no threshold.
    """
    over_past = SLOW_FACTOR * past if past > 0 else math.inf
    if not usual:
        return eased * max(over_past, MIN_PASS_S)
    return eased * max(SLOW_FACTOR * usual, min(over_past, SLOW_FROM_START_FACTOR * usual), MIN_PASS_S)


def _all_slower(own: Mapping[int, NodeGauge], blocks: Collection[int]) -> bool:
    """Return whether most block stages are slower than initially: the machine is busy, and no worker is to blame."""
    ratios = [own[node].pass_s / own[node].past_s if own[node].past_s > 0 else 1.0 for node in blocks]
    return bool(ratios) and median(ratios) > (1 + SLOW_FACTOR) / 2


def _by_host(
    slow: Mapping[int, SlowPart], lately: set[int], hosts: Mapping[int, str], blamed: Blamed
) -> list[SlowPart]:
    """Replace the workers of one machine by the machine if all of them are slow and there are several machines.

    A worker is not blamed while all others of its machine have just become slow, since the machine may be the cause.
    """
    remaining, machines = dict(slow), list[SlowPart]()
    for host in sorted(set(hosts.values())):
        nodes = sorted(node for node, at in hosts.items() if at == host)
        if not 1 < len(nodes) < len(hosts):
            continue
        if remaining.keys() >= {*nodes}:
            worst = max((remaining.pop(node) for node in nodes), key=lambda verdict: verdict.seconds)
            machines.append(worst._replace(fault="slow host", nodes=tuple(nodes)))
        elif remaining.keys() | lately >= {*nodes}:
            new = [node for node in nodes if ("slow worker", (node,)) not in blamed]
            remaining = {node: verdict for node, verdict in remaining.items() if node not in new}
    return [*machines, *remaining.values()]


def slow_data(own: Mapping[int, NodeGauge], blamed: Blamed) -> list[SlowPart]:
    """Return nodes whose batches are late, compared only with their own past, since few nodes read any."""
    slow = []
    for node, gauge in own.items():
        now, past = gauge.read_s, gauge.past_read_s
        eased = threshold_factor(blamed, "slow data", [node])
        limit = eased * max(LATE_BATCH_FACTOR * past, past + MIN_READ_S, MIN_SHARE_OF_STEP * gauge.step_s)
        if len(gauge.recent) == RECENT and now > limit:
            peer_reads_s = [g.read_s for peer, g in own.items() if peer != node and g.read_s > 0]
            slow.append(SlowPart("slow data", (node,), now, past, median(peer_reads_s) if peer_reads_s else 0.0))
    return slow


MIN_GAIN_PER_COST = 2.0
"""minimum ratio of the time saved by a handover to its cost"""
MIN_S_BETWEEN_HANDOVERS = 30.0
"""seconds of training between two actions"""


def hand_over_slow_stage(run: RunState, replica: ReplicaState) -> d.HandOverSlowStage | None:
    """Return the decision that the next slow worker hands its stage to a spare; None if no handover pays off."""
    if run.settings.diagnose != "act" or run.stopping or run.allotment.done or replica.open_round:
        return None
    gauges = run.gauges.of(replica.holders)
    if not gauges or _too_soon(run):
        return None
    nodes = _nodes_to_replace(run, replica)
    if not nodes:
        return None
    step_s, cost = max(gauge.step_s for gauge in gauges.values()), run.gauges.linking_s
    predicted = step_s * remaining_share(gauges, nodes)
    if (step_s - predicted) * (run.settings.steps - replica.step) <= MIN_GAIN_PER_COST * cost * len(nodes):
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
    if run.settings.diagnose != "act" or not run.settings.arrangement or run.stopping or run.allotment.done:
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
    offered, cost = replica.candidate_plan, run.gauges.linking_s
    steps_left = run.settings.steps - replica.step
    if offered is None or (offered.before_s - offered.step_s) * steps_left <= MIN_GAIN_PER_COST * cost:
        return None
    return d.Reroute(
        replica=replica.number,
        step=replica.step,
        before_s=offered.before_s,
        predicted_s=offered.step_s,
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
