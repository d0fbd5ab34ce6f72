"""Routes over the nodes of several replicas: each in its own, or mixed at every stage boundary (arXiv 2506.10911).

Replica r holds stage s at node r · (S + 1) + s. Microbatch i of replica r is number r · M + i of a step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from planaria.pipeline.routing.arrangement import Arrangement


def node_of(replica: int, stage: int, stages: int) -> int:
    return replica * (stages + 1) + stage


def replicated(replicas: int, stages: int) -> Arrangement:
    """The nodes of so many replicas of stages 0..``stages``."""
    return Arrangement({s: [node_of(r, s, stages) for r in range(replicas)] for s in range(stages + 1)})


def columns(ways: Sequence[Sequence[int]], replicas: int, stages: int) -> list[tuple[int, ...]]:
    """Every replica's microbatches go the ``ways`` (stages, from 0 to 0) among its own nodes."""
    return [tuple(node_of(r, stage, stages) for stage in way) for r in range(replicas) for way in ways]


def mixed(ways: Sequence[Sequence[int]], replicas: int, stages: int, seed: int, step: int) -> list[tuple[int, ...]]:
    """The same, but the k-th microbatches of all replicas change places at every boundary but the last, home.

    Each boundary draws a permutation from seed, step and microbatch alone, so that all agree without a message; being
    one, it loads all replicas alike. A microbatch ends where it began, since its targets are there.
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for i, way in enumerate(ways):
        walks = [[node_of(r, way[0], stages)] for r in range(replicas)]
        at = list(range(replicas))
        for hop, stage in enumerate(way[1:-1]):
            turn = random.Random(f"mixed {seed} {step} {i} {hop}").sample(range(replicas), replicas)
            at = [turn[place] for place in at]
            for r, walk in enumerate(walks):
                walk.append(node_of(at[r], stage, stages))
        found |= {(r, i): (*walk, walk[0]) for r, walk in enumerate(walks)}
    return [found[r, i] for r in range(replicas) for i in range(len(ways))]
