"""Random skipping (SkipPipe, arXiv 2502.19913, without its planner): every microbatch omits some block stages.

Routes obey the paper's guidelines CC1 to CC3: they start and end at stage 0, which is never omitted; all block stages
are visited equally often; no stage is visited twice, and out of order only one place back from the furthest stage.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from math import gcd
from typing import ClassVar

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.pipeline.routing.base import Routing, StageRoute

TRIES = 30
"""draws of one set of stages"""
CYCLES = 200
"""draws of sets that use all stages equally"""


def visits_per_microbatch(stages: int, skip: float) -> int:
    """Return the block stages that each microbatch visits: the integer nearest to (1 − skip) · stages, at least one."""
    return max(1, round((1 - skip) * stages))


class Skipping(Routing):
    """Routes drawn from the run's seed, again in every step."""

    varies: ClassVar[bool] = True

    def routes(self, config: RunConfig, step: int) -> list[StageRoute]:
        return draw_routes(config, step)


def draw_routes(config: RunConfig, step: int) -> list[StageRoute]:
    """Draw the routes of ``step`` from the run's seed; stages are used equally often, within one.

    :raises UserError: if routing.max_jump is too short for so few visits.
    """
    stages, shape = config.pipeline.stages, config.routing
    rng = random.Random(f"skipping {config.seed} {step}")
    routes = balanced_sets(stages, visits_per_microbatch(stages, shape.skip), shape.max_jump, rng)
    drawn = [
        (0, *swap_neighbours(next(routes), rng.randint(0, shape.swaps), shape.max_jump, rng), 0)
        for _ in range(config.pipeline.microbatches)
    ]
    rng.shuffle(drawn)  # otherwise the first drawn would always be the most even
    return drawn


def cc3_violation(walk: Sequence[int], swaps: int, jump: int) -> str:
    """Return how the block stages ``walk`` violate CC3, or an empty string if they do not.

    A walk goes forward by at most ``jump`` places beyond its furthest stage, and at most ``swaps`` times back, to the
    stage just before the furthest.
    """
    furthest = back = 0
    for hop, stage in enumerate(walk):
        if stage in walk[:hop]:
            return f"visits stage {stage} twice"
        if stage > furthest:
            if stage - furthest > jump:
                return f"jumps from stage {furthest} to stage {stage}, more than {jump} places"
            furthest = stage
        elif stage == furthest - 1:
            back += 1
        else:
            return f"goes back from stage {furthest} to stage {stage}, more than one place"
    return f"goes back {back} times, more than {swaps}" if back > swaps else ""


def balanced_sets(stages: int, count: int, jump: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield endless sets of ``count`` stages in natural order, in which all stages occur equally often, within one.

    No two neighbours in a set differ by more than ``jump``.

    :raises UserError: if such sets cannot be drawn.
    """
    while True:
        yield from _draw_cycle(stages, count, jump, rng)


def _draw_cycle(stages: int, count: int, jump: int, rng: random.Random) -> list[list[int]]:
    """Return the sets after which all stages occurred equally often; restart if one cannot be completed."""
    length = stages // gcd(stages, count)
    for _ in range(CYCLES):
        used = dict.fromkeys(range(1, stages + 1), 0)
        cycle: list[list[int]] = []
        while len(cycle) < length and (chosen := _choose(used, count, jump, rng)):
            cycle.append(chosen)
            for stage in chosen:
                used[stage] += 1
        if len(cycle) == length:
            return cycle
    raise UserError(
        f"routing.max_jump = {jump}: {count} visits cannot span {stages} stages in such jumps and use all of "
        "them equally; "
        "raise it, or lower routing.skip"
    )


def _choose(used: dict[int, int], count: int, jump: int, rng: random.Random) -> list[int]:
    """Return ``count`` of the least used stages, in natural order; empty if none was found that obeys ``jump``."""
    for _ in range(TRIES):
        chosen = sorted(sorted(used, key=lambda stage: (used[stage], rng.random()))[:count])
        if not cc3_violation(chosen, 0, jump):
            return chosen
    return []


def swap_neighbours(chosen: list[int], swaps: int, jump: int, rng: random.Random) -> list[int]:
    """Return ``chosen`` with up to ``swaps`` disjoint pairs of neighbouring stages swapped, within ``jump``."""
    walk = list(chosen)
    before = [0, *chosen]
    indices = [k for k in range(len(walk) - 1) if walk[k + 1] == walk[k] + 1 and walk[k + 1] - before[k] <= jump]
    rng.shuffle(indices)
    done: set[int] = set()
    for k in indices:
        if len(done) // 2 < swaps and not {k, k + 1} & done:
            walk[k], walk[k + 1] = walk[k + 1], walk[k]
            done |= {k, k + 1}
    return walk
