"""Compiles routes over nodes of limited memory into a plan: SkipPipe's rule of who goes first, made into lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planaria.pipeline.network.costs import Prices
from planaria.pipeline.plan.actions import Action, Key, Plan, Route
from planaria.pipeline.plan.build import turns, visits
from planaria.pipeline.plan.clock import FirstComeClock


def first_come(routes: Sequence[Route], slots: Mapping[int, int], prices: Prices) -> FirstComeClock:
    """The clock of one step, run to its end, in which microbatch ``i`` goes along ``routes[i]``.

    Nodes take backwards and losses first and then what came first; a node holds at most ``slots`` microbatches
    between their forward and their backward there. All microbatches are at their origins from the beginning.

    :raises UserError: when memory deadlocks, every node waiting for a slot at another.
    """
    lists: dict[int, list[Action]] = defaultdict(list)
    for forward, back in visits(routes):
        lists[forward.node] += [forward, back]
    clock = FirstComeClock(
        Plan(tuple(routes), dict(slots), {n: tuple(todo) for n, todo in lists.items()}), prices, slots
    )
    clock.run()
    return clock


def planned(routes: Sequence[Route], slots: Mapping[int, int], prices: Prices) -> Plan:
    """The plan that repeats :func:`first_come` at these prices, and is safe at any other.

    Each node prefers what it did earlier on that clock, and a forward waits for the backward that freed its slot
    there. All that waits then waits for something earlier on one clock: the plan cannot deadlock and no node ever holds
    more than ``slots``, however long passes and messages really take.
    """
    clock = first_come(routes, slots, prices)
    ran = {node: [clock.graph.actions[n] for n in numbers] for node, numbers in clock.ran.items()}
    before = turns(action for actions in ran.values() for action in actions)
    return Plan(
        routes=tuple(tuple(route) for route in routes),
        slots={node: slots[node] for node in ran if node in slots},
        actions={node: tuple(_compiled(actions, slots.get(node), before)) for node, actions in sorted(ran.items())},
    )


def _compiled(actions: Sequence[Action], slots: int | None, before: Mapping[Key, Key]) -> list[Action]:
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
