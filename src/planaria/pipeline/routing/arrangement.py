"""The stage of each node, and routes over the nodes of several replicas.

With one worker per stage, a node is its stage's number. Replica r holds stage s at node r · (S + 1) + s, and microbatch
i of replica r is number r · M + i of a step.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

Pair = tuple[int, int]
"""two nodes that exchange messages, the smaller first"""


class Arrangement:
    """The present nodes, by number, and the stage of each."""

    def __init__(self, nodes: Mapping[int, Sequence[int]]) -> None:
        """:param nodes: stage → its nodes; the first sums up their gradients. Those of stage 0 are data nodes."""
        self._nodes = {stage: tuple(held) for stage, held in sorted(nodes.items()) if held}
        self.stage = dict(sorted((node, stage) for stage, held in self._nodes.items() for node in held))

    @classmethod
    def single(cls, stages: int) -> Arrangement:
        """Return one node for each of the stages 0..``stages``."""
        return cls({stage: (stage,) for stage in range(stages + 1)})

    def of(self, present: Collection[int]) -> Arrangement:
        """Return the arrangement of the ``present`` nodes only."""
        return Arrangement({stage: [n for n in held if n in present] for stage, held in self._nodes.items()})

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages with a node, in natural order."""
        return tuple(self._nodes)

    @property
    def shared(self) -> bool:
        """Whether any stage has several nodes."""
        return len(self._nodes) < len(self.stage)

    def nodes(self, stage: int) -> tuple[int, ...]:
        """Return the nodes of ``stage``, its first node first."""
        return self._nodes.get(stage, ())

    def peers(self, node: int) -> tuple[int, ...]:
        """Return all nodes of the stage of ``node``, itself included; the first sums up their gradients."""
        return self.nodes(self.stage[node])

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first node of every stage."""
        return tuple(held[0] for held in self._nodes.values())

    @property
    def spine(self) -> tuple[int, ...]:
        """The route of a validation: the first node of every stage in natural order."""
        return (*self.firsts, self.firsts[0])

    def pairs(self, routes: Iterable[Collection[int]] = ()) -> set[Pair]:
        """Return a replica's edges: along ``routes`` and the spine, and from each node to the first of its stage."""
        paths = [*routes, self.spine, *((self.peers(node)[0], node) for node in self.stage)]
        met = {pair for route in paths for pair in pairwise(route)}
        return {(min(pair), max(pair)) for pair in met if pair[0] != pair[1]}


def node_of(replica: int, stage: int, stages: int) -> int:
    return replica * (stages + 1) + stage


def replicate_nodes(replicas: int, stages: int) -> Arrangement:
    """Return the nodes of ``replicas`` replicas of stages 0..``stages``."""
    return Arrangement({s: [node_of(r, s, stages) for r in range(replicas)] for s in range(stages + 1)})


def replicate_routes(routes: Sequence[Sequence[int]], replicas: int, stages: int) -> list[tuple[int, ...]]:
    """Return the routes on which each replica's microbatches take ``routes`` (stages, from 0 to 0) among its own
    nodes."""
    return [tuple(node_of(r, stage, stages) for stage in route) for r in range(replicas) for route in routes]


def mix_routes(
    routes: Sequence[Sequence[int]], replicas: int, stages: int, seed: int, step: int
) -> list[tuple[int, ...]]:
    """Return the same routes, but permute the k-th microbatches of all replicas at every boundary except the last.

    Each boundary draws a permutation from seed, step and microbatch alone, so all replicas agree without messages and
    have equal load. A microbatch ends where it began, because its targets are there.
    """
    mixed: dict[tuple[int, int], tuple[int, ...]] = {}
    for i, route in enumerate(routes):
        walks = [[node_of(r, route[0], stages)] for r in range(replicas)]
        at = list(range(replicas))
        for hop, stage in enumerate(route[1:-1]):
            turn = random.Random(f"mixed {seed} {step} {i} {hop}").sample(range(replicas), replicas)
            at = [turn[index] for index in at]
            for r, walk in enumerate(walks):
                walk.append(node_of(at[r], stage, stages))
        mixed |= {(r, i): (*walk, walk[0]) for r, walk in enumerate(walks)}
    return [mixed[r, i] for r in range(replicas) for i in range(len(routes))]
