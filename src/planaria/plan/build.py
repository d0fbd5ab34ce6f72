"""Builds a plan from routes: GPipe (forwards first) or 1F1B (backwards first)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from planaria.config import PipelineConfig
from planaria.plan.actions import Action, Key, Plan, Route


def build(routes: Sequence[Route], order: str, in_flight: int, backward: bool = True) -> Plan:
    """The plan that sends microbatch ``i`` along ``routes[i]``.

    ``order`` is 'gpipe' or '1f1b'. At most ``in_flight`` microbatches are between their embedding and their last
    backward at any time. Gradients are accumulated in the order of microbatches at every stage, so that the sum does
    not depend on timing. Without ``backward`` the plan is a validation: forwards only.
    """
    lists: dict[int, list[Action]] = defaultdict(list)
    for i, route in enumerate(routes):
        last = len(route) - 1
        for hop, stage in enumerate(route):
            before, behind = (route[hop - 1] if hop else None), (route[hop + 1] if hop < last else None)
            admission = _admission(i, hop, in_flight, backward)
            lists[stage].append(Action("forward", i, hop, stage, before, behind, admission))
            if backward:
                after = (Key("forward", i, hop), *_in_order(routes, i, hop))
                lists[stage].append(Action("backward", i, hop, stage, behind, before, after))
    first = "forward" if order == "gpipe" else "backward"
    return Plan(
        routes=tuple(tuple(r) for r in routes),
        in_flight=in_flight,
        actions={
            stage: tuple(sorted(todo, key=lambda a: (_heavy(a), a.kind != first, a.microbatch, -a.hop)))
            for stage, todo in sorted(lists.items())
        },
    )


def plan_for(config: PipelineConfig, routes: Sequence[Route], backward: bool = True) -> Plan:
    """The plan of a recipe's pipeline section over these routes.

    By default 1F1B has two microbatches in flight for every worker: with one, links that take time or ends that cost as
    much as a stage leave the pipeline half empty.
    """
    default = 2 * (config.stages + 1) if config.order == "1f1b" else len(routes)
    return build(routes, config.order, min(config.in_flight or default, len(routes)), backward)


def _heavy(action: Action) -> bool:
    """The ends embed first: it costs little, and a microbatch that waits behind other heads starves the pipeline."""
    return action.stage == 0 and action.hop > 0


def _admission(i: int, hop: int, in_flight: int, backward: bool) -> tuple[Key, ...]:
    """A microbatch may start once the one ``in_flight`` before it is through."""
    if hop or not backward or i < in_flight:
        return ()
    return (Key("backward", i - in_flight, 0),)


def _in_order(routes: Sequence[Route], i: int, hop: int) -> tuple[Key, ...]:
    """The backward of the previous microbatch that has the same role at the same stage.

    At the ends, embedding and head hold their gradients apart, so they are two roles; a block stage has one.
    """
    stage, ends = routes[i][hop], routes[i][hop] == 0
    for j in range(i - 1, -1, -1):
        for other, visited in enumerate(routes[j]):
            if visited == stage and (not ends or (other == 0) == (hop == 0)):
                return (Key("backward", j, other),)
    return ()
