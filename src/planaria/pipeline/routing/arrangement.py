"""Which stage each node holds. Where every stage has one worker, a node is its stage's number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

Pair = tuple[int, int]
"""two nodes that exchange messages, the smaller first"""


class Arrangement:
    """The nodes that are there, by number, and the stage that each holds."""

    def __init__(self, nodes: Mapping[int, Sequence[int]]) -> None:
        """``nodes``: stage → the nodes that hold it; the first adds up what all have. Stage 0's are data nodes."""
        self._nodes = {stage: tuple(held) for stage, held in sorted(nodes.items()) if held}
        self.stage = dict(sorted((node, stage) for stage, held in self._nodes.items() for node in held))

    @classmethod
    def single(cls, stages: int) -> Arrangement:
        """One node for each of the stages 0..``stages``."""
        return cls({stage: (stage,) for stage in range(stages + 1)})

    def of(self, present: Collection[int]) -> Arrangement:
        """The same, of the ``present`` nodes only."""
        return Arrangement({stage: [n for n in held if n in present] for stage, held in self._nodes.items()})

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that some node holds, in natural order."""
        return tuple(self._nodes)

    @property
    def shared(self) -> bool:
        """Does any stage have several nodes?"""
        return len(self._nodes) < len(self.stage)

    def nodes(self, stage: int) -> tuple[int, ...]:
        """The nodes that hold ``stage``, the first of them first."""
        return self._nodes.get(stage, ())

    def peers(self, node: int) -> tuple[int, ...]:
        """All nodes of the stage of ``node``, itself included. The first adds up what all of them have."""
        return self.nodes(self.stage[node])

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first node of every stage."""
        return tuple(held[0] for held in self._nodes.values())

    @property
    def spine(self) -> tuple[int, ...]:
        """The route in natural order over the first node of every stage: a validation's."""
        return (*self.firsts, self.firsts[0])

    def pairs(self, routes: Iterable[Collection[int]] = ()) -> set[Pair]:
        """The edges of a replica: along ``routes`` and the spine, and from each node to the first of its stage."""
        ways = [*routes, self.spine, *((self.peers(node)[0], node) for node in self.stage)]
        met = {pair for way in ways for pair in pairwise(way)}
        return {(min(pair), max(pair)) for pair in met if pair[0] != pair[1]}
