"""One fixed order of all actions of a plan, for carrying it out in a single process."""

from __future__ import annotations

import heapq

from planaria.pipeline.plan.actions import Action, Plan
from planaria.pipeline.plan.graph import Graph, deadlock, graph


def topological_order(plan: Plan) -> list[Action]:
    """All actions in one deterministic order in which every action finds its inputs ready.

    Each stage takes the first ready action of its list, with one exception: a microbatch enters the pipeline only when
    nothing else can be done. Alone in a process there is nothing to overlap, and so no more microbatches are alive at
    a time than must be; never more than ``plan.in_flight``. Raises UserError, naming actions, if no order exists.
    """
    numbered = graph(plan)
    order = feasible(numbered)
    if len(order) < len(numbered.actions):
        raise deadlock(numbered, order)
    return [numbered.actions[n] for n in order]


def feasible(numbered: Graph) -> list[int]:
    """The numbers of all actions that can ever be done, in the order of :func:`topological_order`."""

    def rank(n: int) -> tuple[bool, int, int]:
        action = numbered.actions[n]
        return (action.kind == "forward" and action.hop == 0, numbered.places[n], n)

    waits = list(numbered.waits)
    ready = [rank(n) for n, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        *_, done = heapq.heappop(ready)
        order.append(done)
        for n in numbered.followers(done):
            waits[n] -= 1
            if not waits[n]:
                heapq.heappush(ready, rank(n))
    return order
