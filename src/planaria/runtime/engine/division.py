"""How many layers each block stage gets of machines that are not alike. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from planaria.common.errors import UserError


@dataclass(frozen=True)
class Machine:
    """A worker, as it was timed."""

    layer_s: float
    """seconds that a decoder layer's passes of one microbatch take it"""
    most: int
    """decoder layers of a block stage for which it has room"""
    ends: bool = True
    """has it room for the ends?"""


def divide(layers: int, stages: int, ends: float, machines: Sequence[Machine]) -> list[int]:
    """The layers of each block stage, largest first, so that the slowest stage's passes take as little as they can.

    A pipeline is as fast as its slowest stage. One of the ``machines`` takes the ends, which are as much work as
    ``ends`` layers, and each block stage is on one of the others.

    :raises UserError: when they have no room for all layers.
    """
    limits = sorted({m.layer_s * n for m in machines for n in (ends, *range(1, min(layers, m.most) + 1))})
    low, high = 0, len(limits)
    while low < high:  # the lowest limit under which there is room
        middle = (low + high) // 2
        if _within(limits[middle], layers, stages, ends, machines) is None:
            low = middle + 1
        else:
            high = middle
    chosen = _within(limits[low], layers, stages, ends, machines) if low < len(limits) else None
    if chosen is None:
        room = sum(sorted((m.most for m in machines), reverse=True)[:stages])
        raise UserError(
            f"pipeline.layers = 'auto': the {len(machines)} workers that were timed have room for {room} of {layers} "
            f"layers in {stages} stages beside the ends; lower model.layers, or raise pipeline.stages"
        )
    return _spread(layers, chosen)


def _within(limit_s: float, layers: int, stages: int, ends: float, machines: Sequence[Machine]) -> list[Machine] | None:
    """The machines of the block stages if no stage's passes are to take longer than ``limit_s``; None if some must.

    The ends go where the fewest layers would.
    """
    able = [m for m in machines if m.ends and m.layer_s * ends <= limit_s]
    if not able:
        return None
    others = list(machines)
    others.remove(min(able, key=lambda m: _room(m, limit_s)))
    chosen = sorted(others, key=lambda m: -_room(m, limit_s))[:stages]
    rooms = [_room(m, limit_s) for m in chosen]
    return chosen if len(rooms) == stages and min(rooms) >= 1 and sum(rooms) >= layers else None


def _room(machine: Machine, limit_s: float) -> int:
    """Layers that a machine can pass within the limit."""
    return min(machine.most, math.floor(limit_s / machine.layer_s * (1 + 1e-9)))


def _spread(layers: int, machines: Sequence[Machine]) -> list[int]:
    """One layer each, and then each further one where it takes the stage the least long."""
    counts = [1] * len(machines)
    waiting = [(2 * m.layer_s, n) for n, m in enumerate(machines) if m.most > 1]
    heapq.heapify(waiting)
    for _ in range(layers - len(machines)):
        _, n = heapq.heappop(waiting)
        counts[n] += 1
        if counts[n] < machines[n].most:
            heapq.heappush(waiting, ((counts[n] + 1) * machines[n].layer_s, n))
    return sorted(counts, reverse=True)
