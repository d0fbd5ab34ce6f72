"""Detect slow workers, machines and data by comparing each with its own past and with the others. Pure.

After C4D (arXiv 2406.04594): workers do similar work, so they are compared with each other instead of a model. In a
pipeline, block stages are comparable by the work of their passes. A pass starts when its batch is present, so that slow
data do not count against the worker. The thresholds are planaria's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median

from planaria.control.slowness.slow_part import Blamed, SlowPart, threshold_factor
from planaria.control.state.gauges import RECENT, NodeGauge

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
