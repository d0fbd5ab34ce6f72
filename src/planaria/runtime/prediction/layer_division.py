"""Division of a model's decoder layers among machines of different speed and memory."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple, TypeVar

from planaria.common.errors import UserError

T = TypeVar("T")
MAX_EXACT = 12
"""machines among which unequal layers are divided; further ones, the slowest, become spares"""


@dataclass(frozen=True)
class WorkerCapacity:
    """The measured capacity of a worker."""

    layer_s: float
    """seconds of the passes of a microbatch through the timed decoder layer"""
    most: int
    """largest size of a block stage in its memory, in decoder layers like the timed one"""
    ends: bool = True
    """whether the ends fit in its memory"""


class LayerCost(NamedTuple):
    """A decoder layer, compared with the timed one."""

    work: float = 1.0
    size: float = 1.0


def divide(layers: Sequence[LayerCost], stages: int, ends: float, machines: Sequence[WorkerCapacity]) -> list[int]:
    """Return the number of layers of each block stage that makes the slowest stage as fast as possible.

    One of the ``machines`` holds the ends, which are as much work as ``ends`` timed layers; each block stage is on one
    of the others. Of equal layers, the first stages get most.

    :raises UserError: if the layers do not fit.
    """
    layer_counts = _unequal(layers, stages, ends, machines) if len(set(layers)) > 1 else None
    if len(set(layers)) == 1:
        layer_counts = _equal(len(layers), stages, ends, machines)
    if layer_counts is None:
        room = sum(sorted((m.most for m in machines), reverse=True)[:stages])
        size = f"{sum(load.size for load in layers):.4g}"
        raise UserError(
            f"pipeline.layers = 'auto': the {len(machines)} timed workers have room for {room} of {size} layers "
            f"in {stages} stages besides the ends; lower model.layers, or raise pipeline.stages"
        )
    return layer_counts


def _lowest(limits: Sequence[float], feasible: Callable[[float], T | None]) -> T | None:
    """Return the result under the lowest feasible one of the ascending ``limits``, or None if none is feasible."""
    index = bisect_left(limits, True, key=lambda limit: feasible(limit) is not None)
    return feasible(limits[index]) if index < len(limits) else None


def _equal(layers: int, stages: int, ends: float, machines: Sequence[WorkerCapacity]) -> list[int] | None:
    limits = sorted({m.layer_s * n for m in machines for n in (ends, *range(1, min(layers, m.most) + 1))})
    chosen = _lowest(limits, lambda limit: _within(limit, layers, stages, ends, machines))
    return None if chosen is None else _spread_layers(layers, chosen)


def _unequal(
    layers: Sequence[LayerCost], stages: int, ends: float, machines: Sequence[WorkerCapacity]
) -> list[int] | None:
    if len(machines) > MAX_EXACT:  # the fastest ones; those without room for the ends must not be all
        machines = sorted(machines, key=lambda m: (not m.ends, m.layer_s))[: max(MAX_EXACT, stages + 1)]
    sums = [0.0, *accumulate(load.work for load in layers)]
    segments = {last - first for first, last in combinations(sums, 2)}
    limits = sorted({m.layer_s * work * (1 + 1e-9) for m in machines for work in (ends, *segments)})
    return _lowest(limits, lambda limit: _cover_layers(limit, layers, stages, ends, machines))


def _cover_layers(
    limit_s: float, layers: Sequence[LayerCost], stages: int, ends: float, machines: Sequence[WorkerCapacity]
) -> list[int] | None:
    """Return the layers of each stage within ``limit_s``, or None if impossible.

    For each set of machines, the furthest layer that they reach, each with as many layers as it can: reaching further
    is never worse for the rest. The next stages need a layer each.
    """
    reached: dict[frozenset[int], tuple[int, ...]] = {frozenset(): (0,)}
    for done in range(1, stages + 1):
        following: dict[frozenset[int], tuple[int, ...]] = {}
        for used, bounds in reached.items():
            for n in set(range(len(machines))) - used:
                bound = min(_reach(bounds[-1], machines[n], limit_s, layers), len(layers) - (stages - done))
                best = following.get(used | {n})
                if bound > bounds[-1] and (best is None or bound > best[-1]):
                    following[used | {n}] = (*bounds, bound)
        reached = following
    for used, bounds in sorted(reached.items(), key=lambda entry: sorted(entry[0])):
        unused = [m for n, m in enumerate(machines) if n not in used]
        if bounds[-1] == len(layers) and any(m.ends and m.layer_s * ends <= limit_s for m in unused):
            return [last - first for first, last in pairwise(bounds)]
    return None


def _reach(first: int, machine: WorkerCapacity, limit_s: float, layers: Sequence[LayerCost]) -> int:
    """Return the end of the longest stage from layer ``first`` on that a machine can hold and pass within the limit."""
    work = size = 0.0
    for number in range(first, len(layers)):
        work, size = work + layers[number].work, size + layers[number].size
        if machine.layer_s * work > limit_s or size > machine.most * (1 + 1e-9):
            return number
    return len(layers)


def _within(
    limit_s: float, layers: int, stages: int, ends: float, machines: Sequence[WorkerCapacity]
) -> list[WorkerCapacity] | None:
    """Return the machines of block stages that stay within ``limit_s``, or None if impossible.

    The ends go to the machine with room for the fewest layers.
    """
    able = [m for m in machines if m.ends and m.layer_s * ends <= limit_s]
    if not able:
        return None
    candidates = list(machines)
    candidates.remove(min(able, key=lambda m: _room(m, limit_s)))
    chosen = sorted(candidates, key=lambda m: -_room(m, limit_s))[:stages]
    rooms = [_room(m, limit_s) for m in chosen]
    return chosen if len(rooms) == stages and min(rooms) >= 1 and sum(rooms) >= layers else None


def _room(machine: WorkerCapacity, limit_s: float) -> int:
    return min(machine.most, math.floor(limit_s / machine.layer_s * (1 + 1e-9)))


def _spread_layers(layers: int, machines: Sequence[WorkerCapacity]) -> list[int]:
    """Assign one layer to each machine, then each remaining layer to the machine with the lowest resulting time."""
    counts = [1] * len(machines)
    waiting = [(2 * m.layer_s, n) for n, m in enumerate(machines) if m.most > 1]
    heapq.heapify(waiting)
    for _ in range(layers - len(machines)):
        _, n = heapq.heappop(waiting)
        counts[n] += 1
        if counts[n] < machines[n].most:
            heapq.heappush(waiting, ((counts[n] + 1) * machines[n].layer_s, n))
    return sorted(counts, reverse=True)
