"""A lower bound on a plan's step time, for any order of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import Costs, MessageCosts
from planaria.pipeline.plan.actions import Graph, StepPlan, build_graph, deadlock_error, feasible_actions


@dataclass(frozen=True)
class PlanBound:
    """A lower bound on a step, seconds, and the part of the plan that attains it."""

    step_s: float
    binds: str


def lower_bound(plan: StepPlan, costs: Costs, message_bytes: MessageBytes) -> PlanBound:
    """Return the largest of these lower bounds on the time of any execution of ``plan``:

    - a *microbatch*: its route, alone in the pipeline;
    - a *chain*: the longest chain of dependent actions, across microbatches if one waits for another's admission
      (``in_flight``) or for its turn to add to a gradient;
    - a *node*: the earliest start of its first action, all its work, and the least time from its last action to the
      end;
    - a *link*: the same for the messages in one direction, which share its bandwidth;
    - *copies*: the same for a node's copies from its device or to it.

    :raises UserError: if the plan deadlocks.
    """
    prices, numbered = MessageCosts(costs, message_bytes), build_graph(plan)
    order = feasible_actions(numbered)
    if len(order) < len(numbered.actions):
        raise deadlock_error(numbered, order)
    compute = [prices.compute(action.kind, action.node, action.hop) for action in numbered.actions]
    carry = [_message_time(numbered, n, prices) for n in range(len(compute))]
    heads = _earliest_starts(numbered, order, compute, carry)
    tails = _shortest_remainders(numbered, order, compute, carry)
    chain = max(head + work + tail for head, work, tail in zip(heads, compute, tails, strict=True))
    terms = [
        *_microbatch_terms(numbered, compute, carry),
        (chain, f"chain of microbatches ({_describe_memory_limit(plan)})"),
        *_stage_terms(numbered, compute, heads, tails),
        *_link_terms(numbered, prices, compute, heads, tails),
    ]
    ticks, binds = max(terms, key=lambda term: term[0])  # the first of equals: the simplest reason
    return PlanBound(MessageCosts.seconds(ticks), binds)


def _describe_memory_limit(plan: StepPlan) -> str:
    """Describe the memory limit of the nodes, or of the one that admits microbatches."""
    if plan.slots.keys() == {0}:
        return f"in_flight = {plan.slots[0]}"
    return "memory for " + " or ".join(map(str, sorted(set(plan.slots.values())))) + " at a node"


def _message_time(numbered: Graph, n: int, prices: MessageCosts) -> int:
    """Return the time of the message that action ``n`` sends, with its copies; 0 if it sends none."""
    receiver = numbered.receiver[n]
    if receiver < 0:
        return 0
    action = numbered.actions[n]
    return prices.carry(action.node, numbered.actions[receiver].node, action.kind) + 2 * prices.staging


def _earliest_starts(numbered: Graph, order: list[int], compute: list[int], carry: list[int]) -> list[int]:
    """Return the earliest start of each action."""
    heads = [0] * len(order)
    for n in order:
        done = heads[n] + compute[n]
        for later in numbered.local[n]:
            heads[later] = max(heads[later], done)
        if (receiver := numbered.receiver[n]) >= 0:
            heads[receiver] = max(heads[receiver], done + carry[n])
    return heads


def _shortest_remainders(numbered: Graph, order: list[int], compute: list[int], carry: list[int]) -> list[int]:
    """Return the least time from the end of each action to the end of the step."""
    tails = [0] * len(order)
    for n in reversed(order):
        for later in numbered.local[n]:
            tails[n] = max(tails[n], compute[later] + tails[later])
        if (receiver := numbered.receiver[n]) >= 0:
            tails[n] = max(tails[n], carry[n] + compute[receiver] + tails[receiver])
    return tails


Term = tuple[int, str]


def _microbatch_terms(numbered: Graph, compute: list[int], carry: list[int]) -> Iterator[Term]:
    alone: dict[int, int] = defaultdict(int)
    for action, work, sent in zip(numbered.actions, compute, carry, strict=True):
        alone[action.microbatch] += work + sent
    for microbatch, ticks in sorted(alone.items()):
        yield ticks, f"microbatch {microbatch}"


def _stage_terms(numbered: Graph, compute: list[int], heads: list[int], tails: list[int]) -> Iterator[Term]:
    own: dict[int, list[int]] = defaultdict(list)
    for n, action in enumerate(numbered.actions):
        if compute[n]:  # free work may be outside the stage's busy time
            own[action.node].append(n)
    for stage, todo in own.items():
        first, last = min(heads[n] for n in todo), min(tails[n] for n in todo)
        yield first + sum(compute[n] for n in todo) + last, f"stage {stage}"


def _link_terms(
    numbered: Graph, prices: MessageCosts, compute: list[int], heads: list[int], tails: list[int]
) -> Iterator[Term]:
    """Yield terms of links, and of a device's copies each way, which serve one message at a time."""
    staging, lanes = prices.staging, defaultdict[str, list[tuple[int, int, int]]](list)
    for n, receiver in enumerate(numbered.receiver):
        if receiver >= 0:
            a, b, kind = numbered.actions[n].node, numbered.actions[receiver].node, numbered.actions[n].kind
            ready, rest = heads[n] + compute[n], compute[receiver] + tails[receiver]
            transmit, carry_time = prices.transmit(a, b, kind), prices.carry(a, b, kind)
            lane = f"link into {b}" if prices.shared_inbound else f"link {a}→{b}"
            lanes[lane].append((ready + staging, transmit, carry_time - transmit + staging + rest))
            if staging:
                lanes[f"copies off stage {a}"].append((ready, staging, carry_time + staging + rest))
                lanes[f"copies onto stage {b}"].append((ready + staging + carry_time, staging, rest))
    for name, messages in lanes.items():
        before, transmit_times, after = zip(*messages, strict=True)
        yield min(before) + sum(transmit_times) + min(after), name
