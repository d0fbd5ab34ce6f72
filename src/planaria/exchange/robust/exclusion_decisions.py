"""Updates in a round: their weight over all stages of a replica, and the replicas excluded as Byzantine. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planaria.control.facts import decisions as d
from planaria.control.facts.update_reports import rounded
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState
from planaria.exchange.base import UpdateWeights
from planaria.exchange.robust.equivocation import Exclusions, Received, find_equivocations, join_digests
from planaria.exchange.robust.suspicion import byzantine_bound


def excluded_replicas(run: RunState) -> dict[int, str]:
    """Return the replicas excluded from rounds because of repeated invalid updates, with reasons."""
    return Exclusions(invalid=run.suspicion.exclusions(run.exchange).invalid).left_out


def left_out(run: RunState) -> dict[int, str]:
    """Return the replicas excluded from the current or next all-reduced step, with reasons."""
    return run.suspicion.exclusions(run.exchange).left_out if run.exchange.exchanges_gradients else {}


def disagreement(run: RunState, replica: ReplicaState) -> d.LeaveOut | d.Finish | None:
    """After all finished their part of an all-reduced step, compare the gradients they used."""
    if not replica.received:
        return None
    exclusions = run.suspicion.examine(_received_in_step(replica), run.exchange)
    if not exclusions.min_byzantine:
        return None
    if wrong := run.suspicion.with_findings(exclusions.all).why_impossible(run.exchange):
        return d.Finish(outcome="failed", reason=wrong)
    return d.LeaveOut(
        replica=replica.number,
        generation=replica.generation,
        step=replica.step,
        byzantine=list(exclusions.byzantine),
        disputes=list(exclusions.disputes),
    )


def _received_in_step(replica: ReplicaState) -> Received:
    """Return member → member → digests of all stages."""
    nodes = replica.held
    columns = zip(*(nodes.nodes(stage) for stage in nodes.stages), strict=False)
    received = ((replica.received.get(replica.holders[node], {}) for node in column) for column in columns)
    return {member: join_digests(of_stages) for member, of_stages in enumerate(received)}


def equivocating_replicas(run: RunState, members: Collection[int]) -> Exclusions:
    """Return the equivocating replicas among those about to settle a round together."""
    if not run.exchange.detects_equivocation(len(members)):
        return Exclusions()
    received = {}
    for number in members:
        replica, by_node = run.replicas[number], dict[int, dict[int, str]]()
        assert replica.open_round is not None
        for (node, member), digest in replica.open_round.received.items():
            by_node.setdefault(node, {})[member] = digest
        nodes = (replica.arrangement.nodes(stage)[0] for stage in replica.arrangement.stages)
        received[number] = join_digests(by_node.get(node, {}) for node in nodes)
    return find_equivocations(received, members, byzantine_bound(run.exchange))


Coefficients = dict[int, dict[int, float]]
Rivals = dict[str, dict[int, float]]


def settle_weights(run: RunState, round: int, members: Sequence[int]) -> tuple[Coefficients, Rivals]:
    """Return the weights in :class:`~planaria.control.facts.members.Settle` for a ``round`` that ``members`` settle."""
    weighing = run.exchange.weighing
    if weighing is None or len(members) < 2:
        return {}, {}
    members = sorted(members)
    coefficients: Coefficients = {}
    first = UpdateWeights()
    for me in members:
        open_round, arrangement = run.replicas[me].open_round, run.replicas[me].arrangement
        assert open_round is not None
        stages = [open_round.products_at(arrangement.nodes(stage)[0]) for stage in arrangement.stages]
        if (weights := weighing.update_weights(stages, members, me, round)) is None:  # too few for the rule
            return {}, {}
        first = first if coefficients else weights
        coefficients[me] = dict(weights.coefficients)
    return coefficients, {rule: rounded(of) for rule, of in first.rivals().items()}
