"""Workers, machines and data that are slow, by what workers measure of their passes and batches. Pure.

A worker is slow whose passes take more than 1.5 times as long as at first, and as the median of its peers'; or more
than twice as long as its peers' from the first. Its peers are the block stages of other machines, where there are any:
of a machine that is slow, most may be. Where all workers of one of several machines are slow, it is the machine. Data
are slow that take more than three times as long to be read as at first. The thresholds are our own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median

from planaria.control.suspicion import Known, Verdict, ease
from planaria.record.gauges import RECENT, Gauge

SLOW = 1.5
"""times as long as at first, and as its peers' median: a slow worker's passes"""
ALWAYS = 2.0
"""times as long as its peers' median: of a worker that has been slow from the first"""
LEAST_PASS_S = 0.02
"""what passes take at least that are worth a verdict"""
LATE = 3.0
"""times as long as at first: batches that come late"""
LEAST_READ_S = 0.02
"""what a step's batches take longer, at least"""
OF_STEP = 0.05
"""of a step: what they take, at least"""


def slow_workers(
    own: Mapping[int, Gauge], work: Sequence[float], known: Known, hosts: Mapping[int, str]
) -> list[Verdict]:
    """Workers whose passes take too long, or their machines; the ends are compared with their own past alone.

    ``work``: of a pass, by stage; empty where block stages are alike. ``hosts``: node → its worker's machine.
    """
    judged = {node: gauge for node, gauge in own.items() if len(gauge.recent) == RECENT}
    per_work = {n: g.pass_s / _work(g, work) for n, g in judged.items() if g.last.stage}
    slow, lately = dict[int, Verdict](), set[int]()
    for node, gauge in judged.items():
        peers = _peers(node, per_work.keys(), hosts)
        usual = median(per_work[peer] for peer in peers) * _work(gauge, work) if peers and node in per_work else 0.0
        if not usual and _all_slower(own, peers or per_work.keys()):
            continue
        limit = _limit(gauge.past_s, usual, min(ease(known, "slow worker", [node]), ease(known, "slow host", [node])))
        if gauge.pass_s > limit:
            slow[node] = Verdict("slow worker", (node,), gauge.pass_s, gauge.past_s, usual)
        if gauge.last.pass_s > limit:
            lately.add(node)
    return _by_host(slow, lately, hosts, known)


def _work(gauge: Gauge, work: Sequence[float]) -> float:
    return work[gauge.last.stage] if work else 1.0


def _peers(node: int, blocks: Collection[int], hosts: Mapping[int, str]) -> list[int]:
    """The block stages that a node is compared with."""
    others = [other for other in blocks if other != node]
    return [other for other in others if hosts[other] != hosts[node]] or others


def _limit(past: float, usual: float, eased: float) -> float:
    """What passes take that are slow; ``usual`` is 0 where there is nobody to compare with.

    Passes that took no time at first only hand on, and are no measure.
    """
    over_past = SLOW * past if past > 0 else math.inf
    if not usual:
        return eased * max(over_past, LEAST_PASS_S)
    return eased * max(SLOW * usual, min(over_past, ALWAYS * usual), LEAST_PASS_S)


def _all_slower(own: Mapping[int, Gauge], blocks: Collection[int]) -> bool:
    """Are the block stages' passes slower than at first, by and large? Then the machine is busy, and nobody's fault."""
    ratios = [own[node].pass_s / own[node].past_s if own[node].past_s > 0 else 1.0 for node in blocks]
    return bool(ratios) and median(ratios) > (1 + SLOW) / 2


def _by_host(slow: Mapping[int, Verdict], lately: set[int], hosts: Mapping[int, str], known: Known) -> list[Verdict]:
    """Where all workers of one machine of several are slow, it is the machine.

    Nobody is blamed anew while all others of the machine have just become slow: the machine may be.
    """
    left, machines = dict(slow), list[Verdict]()
    for host in sorted(set(hosts.values())):
        nodes = sorted(node for node, at in hosts.items() if at == host)
        if not 1 < len(nodes) < len(hosts):
            continue
        if left.keys() >= {*nodes}:
            worst = max((left.pop(node) for node in nodes), key=lambda verdict: verdict.seconds)
            machines.append(worst._replace(fault="slow host", nodes=tuple(nodes)))
        elif left.keys() | lately >= {*nodes}:
            new = [node for node in nodes if ("slow worker", (node,)) not in known]
            left = {node: verdict for node, verdict in left.items() if node not in new}
    return [*machines, *left.values()]


def slow_data(own: Mapping[int, Gauge], known: Known) -> list[Verdict]:
    """Nodes whose batches come late: compared with their own past alone, for few nodes read any."""
    found = []
    for node, gauge in own.items():
        now, past = gauge.read_s, gauge.past_read_s
        eased = ease(known, "slow data", [node])
        limit = eased * max(LATE * past, past + LEAST_READ_S, OF_STEP * gauge.step_s)
        if len(gauge.recent) == RECENT and now > limit:
            others = [other.read_s for peer, other in own.items() if peer != node and other.read_s > 0]
            found.append(Verdict("slow data", (node,), now, past, median(others) if others else 0.0))
    return found
