"""Random skipping (SkipPipe, arXiv 2502.19913, without its planner): every microbatch leaves out some block stages.

The rules of a route, as the paper's guidelines CC1 to CC3: it starts and ends at the ends, which are never left out;
all block stages are visited equally often; no stage twice, and out of order only one place back from the furthest
stage so far.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from math import gcd
from typing import ClassVar

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.pipeline.routing.base import Route, Routing

TRIES = 30
"""draws of one set of stages"""
CYCLES = 200
"""draws of sets that use all stages equally"""


def visits(stages: int, skip: float) -> int:
    """Block stages that each microbatch visits: the nearest whole number to (1 − skip) · stages, at least one."""
    return max(1, round((1 - skip) * stages))


class Skipping(Routing):
    """Routes drawn from the run's seed, anew in every step."""

    varies: ClassVar[bool] = True

    def routes(self, config: RunConfig, step: int) -> list[Route]:
        return skipping(config, step)


def skipping(config: RunConfig, step: int) -> list[Route]:
    """The routes of ``step``, drawn from the run's seed: each stage is used as often as any other, give or take one.

    :raises UserError: when routing.jump is too short for so few visits.
    """
    stages, shape = config.pipeline.stages, config.routing
    rng = random.Random(f"skipping {config.seed} {step}")
    ways = balanced(stages, visits(stages, shape.skip), shape.jump, rng)
    drawn = [
        (0, *reordered(next(ways), rng.randint(0, shape.swaps), shape.jump, rng), 0)
        for _ in range(config.pipeline.microbatches)
    ]
    rng.shuffle(drawn)  # the first drawn would otherwise always be the most even
    return drawn


def disorder(walk: Sequence[int], swaps: int, jump: int) -> str:
    """How the block stages ``walk`` break CC3, in words; empty if they do not.

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


def balanced(stages: int, count: int, jump: int, rng: random.Random) -> Iterator[list[int]]:
    """Endless sets of ``count`` stages in natural order; after any number of them, all stages came up equally often,
    give or take one. No two neighbours in a set are further apart than ``jump``.

    :raises UserError: when such sets cannot be drawn.
    """
    while True:
        yield from _cycle(stages, count, jump, rng)


def _cycle(stages: int, count: int, jump: int, rng: random.Random) -> list[list[int]]:
    """As many sets as it takes for all stages to come up equally often; begun anew when one cannot be completed."""
    length = stages // gcd(stages, count)
    for _ in range(CYCLES):
        used = dict.fromkeys(range(1, stages + 1), 0)
        found: list[list[int]] = []
        while len(found) < length and (chosen := _choose(used, count, jump, rng)):
            found.append(chosen)
            for stage in chosen:
                used[stage] += 1
        if len(found) == length:
            return found
    raise UserError(
        f"routing.jump = {jump}: {count} visits cannot span {stages} stages in such jumps and use all of them equally; "
        "raise it, or lower routing.skip"
    )


def _choose(used: dict[int, int], count: int, jump: int, rng: random.Random) -> list[int]:
    """``count`` of the stages used least, in natural order; empty if none was found that obeys ``jump``."""
    for _ in range(TRIES):
        chosen = sorted(sorted(used, key=lambda stage: (used[stage], rng.random()))[:count])
        if not disorder(chosen, 0, jump):
            return chosen
    return []


def reordered(chosen: list[int], swaps: int, jump: int, rng: random.Random) -> list[int]:
    """``chosen`` with up to ``swaps`` disjoint pairs of neighbouring stages the other way round, within ``jump``."""
    walk = list(chosen)
    before = [0, *chosen]
    places = [k for k in range(len(walk) - 1) if walk[k + 1] == walk[k] + 1 and walk[k + 1] - before[k] <= jump]
    rng.shuffle(places)
    done: set[int] = set()
    for k in places:
        if len(done) // 2 < swaps and not {k, k + 1} & done:
            walk[k], walk[k + 1] = walk[k + 1], walk[k]
            done |= {k, k + 1}
    return walk
