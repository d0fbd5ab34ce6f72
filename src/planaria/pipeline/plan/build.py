"""Build plans from routes: GPipe (forwards first), 1F1B (backwards first), or SkipPipe's first-come rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from planaria.config.schema import PipelineConfig
from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import UNIT, MessageCosts
from planaria.pipeline.plan.actions import Action, Key, Route, StepPlan
from planaria.pipeline.plan.simulation import FirstComeSimulation, PlanSimulation


def plan_routes(routes: Sequence[Route], order: str, limit: int, backward: bool = True) -> StepPlan:
    """Return the plan that sends microbatch ``i`` along ``routes[i]``.

    ``order`` is 'gpipe' or '1f1b'. At most ``limit`` microbatches are between their embedding and their last
    backward. Every stage accumulates gradients in one fixed order, so that the sum does not depend on timing. Without
    ``backward`` the plan is a validation: forwards only.
    """
    if not backward:
        return _build(routes, order, limit, backward, {})
    return _build(routes, order, limit, backward, _order_of_sums(routes, order, limit))


def _build(
    routes: Sequence[Route], order: str, limit: int, backward: bool, predecessors: Mapping[Key, Key]
) -> StepPlan:
    """Return the plan in which each backward also waits for its predecessor in ``predecessors``, if any."""
    lists: dict[int, list[Action]] = defaultdict(list)
    for forward, back in visits(routes):
        admission = _admitting_action(forward.microbatch, forward.hop, limit, backward)
        lists[forward.node].append(replace(forward, after=admission))
        if backward:
            turn = (predecessors[back.key],) if back.key in predecessors else ()
            lists[back.node].append(replace(back, after=(*back.after, *turn)))
    first = "forward" if order == "gpipe" else "backward"
    return StepPlan(
        routes=tuple(tuple(r) for r in routes),
        slots=dict.fromkeys(sorted({route[0] for route in routes}), limit),
        actions={  # the ends embed first: that costs little, and a microbatch behind other heads starves the pipeline
            stage: tuple(sorted(todo, key=lambda a: (a.returns, a.kind != first, a.microbatch, -a.hop)))
            for stage, todo in sorted(lists.items())
        },
    )


def visits(routes: Sequence[Route]) -> Iterator[tuple[Action, Action]]:
    """Yield the forward and the backward of every visit; the backward waits for its forward."""
    for i, route in enumerate(routes):
        last = len(route) - 1
        for hop, node in enumerate(route):
            before, behind = (route[hop - 1] if hop else None), (route[hop + 1] if hop < last else None)
            forward = Action("forward", i, hop, node, before, behind)
            yield forward, Action("backward", i, hop, node, behind, before, (forward.key,))


def build_plan(config: PipelineConfig, routes: Sequence[Route], backward: bool = True) -> StepPlan:
    """Return the plan of a recipe's pipeline section over these routes."""
    return plan_routes(routes, config.order, max_in_flight(config, len(routes)), backward)


def max_in_flight(config: PipelineConfig, microbatches: int) -> int:
    """Return how many of a step's microbatches may be in flight concurrently.

    By default 1F1B has two per worker: with one, slow links or an expensive stage 0 leave the pipeline half empty.
    """
    default = 2 * (config.stages + 1) if config.order == "1f1b" else microbatches
    return min(config.in_flight or default, microbatches)


def _admitting_action(i: int, hop: int, limit: int, backward: bool) -> tuple[Key, ...]:
    """Return the action after which a microbatch may start: the last backward of the one ``limit`` before it."""
    if hop or not backward or i < limit:
        return ()
    return (Key("backward", i - limit, 0),)


def _order_of_sums(routes: Sequence[Route], order: str, limit: int) -> dict[Key, Key]:
    """Return backward → the previous backward that adds to the same gradient.

    On equal routes, the order is that of microbatches. On crossing routes that order would make microbatches wait at
    every crossing; there, use the order of arrival without waiting, at unit costs. Embedding and head have separate
    gradients, so stage 0 orders them separately.
    """
    if len({tuple(route) for route in routes}) == 1:
        executed = sorted((back for _, back in visits(routes)), key=lambda action: (action.microbatch, -action.hop))
    else:
        simulation = PlanSimulation(_build(routes, order, limit, True, {}), MessageCosts(UNIT, MessageBytes.both(0)))
        simulation.run()
        executed = [simulation.graph.actions[n] for ran in simulation.ran.values() for n in ran]
    return backward_predecessors(executed)


def backward_predecessors(executed: Iterable[Action]) -> dict[Key, Key]:
    """Return backward → the previous backward that adds to the same gradient, given each node's execution order."""
    sums: dict[tuple[int, bool], list[Key]] = defaultdict(list)
    for action in executed:
        if action.kind == "backward":
            sums[action.node, action.returns].append(action.key)
    return {later: earlier for keys in sums.values() for earlier, later in pairwise(keys)}


def simulate_first_come(routes: Sequence[Route], slots: Mapping[int, int], prices: MessageCosts) -> FirstComeSimulation:
    """Simulate one step in which microbatch ``i`` takes ``routes[i]``, to its end.

    Nodes prefer backwards and losses, then the earliest arrival; a node holds at most ``slots`` microbatches between
    forward and backward. All microbatches start at their origins.

    :raises UserError: if memory deadlocks, every node waiting for a slot at another.
    """
    lists: dict[int, list[Action]] = defaultdict(list)
    for forward, back in visits(routes):
        lists[forward.node] += [forward, back]
    simulation = FirstComeSimulation(
        StepPlan(tuple(routes), dict(slots), {n: tuple(todo) for n, todo in lists.items()}), prices, slots
    )
    simulation.run()
    return simulation


def compile_plan(routes: Sequence[Route], slots: Mapping[int, int], prices: MessageCosts) -> StepPlan:
    """Return the plan that repeats :func:`simulate_first_come` at these prices and is safe at any other.

    Each node prefers the order of that simulation, and a forward waits for the backward that freed its slot there.
    Every wait then refers to an earlier action of one execution: the plan cannot deadlock, and no node exceeds
    ``slots``, whatever the real times are.
    """
    simulation = simulate_first_come(routes, slots, prices)
    ran = {node: [simulation.graph.actions[n] for n in numbers] for node, numbers in simulation.ran.items()}
    before = backward_predecessors(action for actions in ran.values() for action in actions)
    return StepPlan(
        routes=tuple(tuple(route) for route in routes),
        slots={node: slots[node] for node in ran if node in slots},
        actions={node: tuple(_with_waits(actions, slots.get(node), before)) for node, actions in sorted(ran.items())},
    )


def _with_waits(actions: Sequence[Action], slots: int | None, before: Mapping[Key, Key]) -> list[Action]:
    freed = [action.key for action in actions if action.kind == "backward" and not action.returns]
    begun, compiled = 0, []
    for action in actions:
        waits = action.after
        if action.kind == "backward" and action.key in before:
            waits += (before[action.key],)
        elif action.kind == "forward" and not action.returns:
            waits += () if slots is None or begun < slots else (freed[begun - slots],)
            begun += 1
        compiled.append(replace(action, after=waits))
    return compiled
