"""Which machine holds more than the others could bring back. Pure.

Copies and parities protect stages from one another's loss. They do not where a stage and what it would be rebuilt from
are on one machine.
"""

from __future__ import annotations

from collections import defaultdict

from planaria.record.state import RunState
from planaria.recovery import recovery
from planaria.recovery.chain import Chain

_OLD = 1 << 30
"""commits after which every copy is complete"""


def exposed(run: RunState) -> dict[str, str]:
    """Machine that has joined → what its loss would cost, where each of its stages alone could be had from others.

    Not the run's own machine: with that, the run ends.
    """
    chain = recovery(run.settings.recovery, run.settings.stages)
    held: defaultdict[str, set[int]] = defaultdict(set)
    for replica in run.live.values():
        for node, worker in replica.holders.items():
            held[run.workers[worker].host].add(replica.arrangement.stage[node])
    found = {}
    for host in sorted(held.keys() - {""}):
        elsewhere = {stage for other, stages in held.items() if other != host for stage in stages}
        lost = frozenset(held[host] - elsewhere)
        alone = [_cost(chain, frozenset({stage})) for stage in lost]
        if len(lost) > 1 and not any(alone) and (cost := _cost(chain, lost)):
            found[host] = f"machine {host} holds stages {', '.join(map(str, sorted(lost)))}: were it lost, {cost}"
    return found


def _cost(chain: Chain, lost: frozenset[int]) -> str:
    """What the loss of these stages together costs beside time; empty: nothing."""
    plan = chain.plan(lost, dict.fromkeys(range(chain.stages + 1), _OLD))
    if plan.reason:
        return f"the run could not go on ({plan.reason})"
    return "all would go back to the newest checkpoint" if plan.rollback == "disk" else ""
