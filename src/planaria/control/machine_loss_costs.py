"""Costs of losing a joined machine with several stages. Pure."""

from __future__ import annotations

from collections import defaultdict

from planaria.control.state.run import RunState
from planaria.recovery.chain import Chain, ChainPlan

COMPLETE_COPY_AGE = 1 << 30
"""commits after which every copy is complete"""


def machine_loss_costs(run: RunState) -> dict[str, str]:
    """Return joined machine → cost of its loss, given the stages that others could rebuild.

    Excludes the run's own machine, whose loss ends the run.
    """
    chain = run.started.chain
    held: defaultdict[str, set[int]] = defaultdict(set)
    for replica in run.live.values():
        for node, worker in replica.holders.items():
            held[run.workers[worker].host].add(replica.arrangement.stage[node])
    costs = {}
    for host in sorted(held.keys() - {""}):
        elsewhere = {stage for other, stages in held.items() if other != host for stage in stages}
        lost = frozenset(held[host] - elsewhere)
        alone = [_cost(chain, frozenset({stage})) for stage in lost]
        if len(lost) > 1 and not any(alone) and (cost := _cost(chain, lost)):
            costs[host] = f"machine {host} holds stages {', '.join(map(str, sorted(lost)))}; if it is lost, {cost}"
    return costs


def plan_of_loss(chain: Chain, lost: frozenset[int]) -> ChainPlan:
    """Return how these stages would be rebuilt if all copies were complete."""
    return chain.plan(lost, dict.fromkeys(range(chain.stages + 1), COMPLETE_COPY_AGE))


def _cost(chain: Chain, lost: frozenset[int]) -> str:
    """Return the harm of losing these stages together, besides time; empty: none."""
    plan = plan_of_loss(chain, lost)
    if plan.reason:
        return f"the run cannot continue ({plan.reason})"
    return "all stages roll back to the newest checkpoint" if plan.rollback == "disk" else ""
