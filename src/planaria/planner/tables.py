"""A problem's numbers as arrays for compiled functions, and the end of a step with gradient sums.

At the end of a step the nodes of each stage send their gradients to one hub, which returns the sum. As on the fleet,
the hub is the node with the shortest round trip if all were ready at the same time (``problem.by_centrality``). Each
node sends when its last pass ends; messages do not queue. Times are nanoseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.common.compiled import compile_function

Ints = NDArray[np.int64]
NO_SUMS: Ints = np.zeros((0, 0, 0), np.int64)
"""``sums`` of a problem whose step ends with its passes"""


class CostTables(NamedTuple):
    """See ``problem.PlanningProblem``."""

    sizes: Ints
    site: Ints
    forward: Ints
    backward: Ints
    link: Ints
    transmit: Ints
    link_back: Ints
    transmit_back: Ints
    slots: Ints
    role: Ints
    sums: Ints
    swaps: int
    jump: int


@compile_function
def round_trip(carry: Ints, site: Ints, nodes: Ints, hub: int) -> int:
    """Return the time until ``nodes`` have the sum from ``hub``, if all have their gradients now."""
    there = back = 0
    for node in nodes:
        if node != hub:
            there = max(there, carry[site[node], site[hub]])
            back = max(back, carry[site[hub], site[node]])
    return there + back


@compile_function
def gradient_sum_times(tables: CostTables, stage: Ints, over: Ints) -> tuple[int, float]:
    """Return when the last node has its stage's sum, and the mean over stages, which gives a search a slope.

    ``over`` [nodes] is the end of each node's last pass. Without sums, return the end of the last pass, and 0.
    """
    last, total = over.max(), 0.0
    if not tables.sums.shape[0]:
        return last, 0.0
    for s in range(tables.sizes.shape[0]):
        nodes, carry = np.flatnonzero(stage == s), tables.sums[min(s, 1)]
        hub, least = nodes[0], round_trip(carry, tables.site, nodes, nodes[0])
        for node in nodes[1:]:
            takes = round_trip(carry, tables.site, nodes, node)
            if takes < least:
                hub, least = node, takes
        whole = over[hub]
        for node in nodes:
            if node != hub:
                whole = max(whole, over[node] + carry[tables.site[node], tables.site[hub]])
        ends = whole
        for node in nodes:
            if node != hub:
                ends = max(ends, whole + carry[tables.site[hub], tables.site[node]])
        last = max(last, ends)
        total += ends
    return last, total / tables.sizes.shape[0]
