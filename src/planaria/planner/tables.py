"""A problem's numbers in plain arrays, as compiled functions take them, and the end of a step in which stages sum.

``problem.Problem`` says what each number means. Times are nanoseconds. At the end of a step the nodes of each stage
send their gradients to one of them, which sends back the sum. That node is the one that could do so soonest if all were
ready at once (``problem.central_first``), as on the fleet. It has the sum when the last of them has sent its own, each
as soon as its last pass is over; messages do not wait for one another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.common.compiled import compiled

Ints = NDArray[np.int64]
NO_SUMS: Ints = np.zeros((0, 0, 0), np.int64)
"""of a problem whose step is over with its passes"""


class Tables(NamedTuple):
    """See ``problem.Problem``."""

    sizes: Ints
    site: Ints
    forward: Ints
    backward: Ints
    link: Ints
    transmit: Ints
    slots: Ints
    role: Ints
    sums: Ints
    swaps: int
    jump: int


@compiled
def round_trip(carry: Ints, site: Ints, nodes: Ints, hub: int) -> int:
    """How long it takes until ``nodes`` have the sum that ``hub`` makes, if all have their gradients now."""
    there = back = 0
    for node in nodes:
        if node != hub:
            there = max(there, carry[site[node], site[hub]])
            back = max(back, carry[site[hub], site[node]])
    return there + back


@compiled
def summed(tables: Tables, stage: Ints, over: Ints) -> tuple[int, float]:
    """When the last node has its stage's sum, if the last pass of each is ``over`` [nodes] then; and the mean of the
    stages, for a search to have a slope. Where sums are not planned, the end of the last pass, and 0."""
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
