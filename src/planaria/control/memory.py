"""What the workers of a replica remember together, so that lost stages can be restored from the others. Pure.

It follows from the steps that were begun and committed, and from which workers are new; each worker finds it out in the
same way (``recovery/retention.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from planaria.recovery.retention import Retention, Versions

NONE_YET = Versions()


@dataclass(frozen=True)
class Memory:
    """Of which step there is a snapshot, and which nodes' workers have their part of it."""

    by: str
    """the strategy"""
    rule: Retention
    versions: Versions = NONE_YET
    nodes: frozenset[int] = frozenset()
    coming: frozenset[int] = frozenset()
    """nodes that will have theirs once the present generation is linked"""

    @property
    def step(self) -> int:
        """That of the newest snapshot that all could go back to; -1: none."""
        return self.versions.retained

    def begun(self, step: int) -> Memory:
        """All begin a step."""
        return replace(self, versions=self.versions.begin(step, self.rule))

    def committed(self, step: int, everybody: Collection[int]) -> Memory:
        """All have committed the step that was begun."""
        if not self.versions.completed(step, self.rule):
            return self
        return replace(self, versions=self.versions.commit(step, self.rule), nodes=frozenset(everybody))

    def formed(self, renewed: Collection[int], restored: Collection[int]) -> Memory:
        """A new generation in which some nodes are ``renewed``: they get a state of others; those ``restored`` among
        them with their part of what is remembered."""
        return replace(self, nodes=self.nodes.difference(renewed), coming=frozenset(restored))

    def restarted(self) -> Memory:
        """A new generation in which not all simply go on: what was under way begins anew."""
        return replace(self, versions=self.versions.restart())

    def linked(self, node: int) -> Memory:
        """A node has what it was to get."""
        if node not in self.coming:
            return self
        return replace(self, nodes=self.nodes | {node}, coming=self.coming - {node})

    def without(self, nodes: Collection[int]) -> Memory:
        """The workers of these nodes are dead."""
        return replace(self, nodes=self.nodes.difference(nodes), coming=self.coming.difference(nodes))

    def resumed(self, step: int, nodes: Collection[int]) -> Memory:
        """A run begins from the snapshot of ``step``, of which these nodes have their part."""
        return replace(self, versions=Versions(step), nodes=frozenset(nodes))

    def void(self) -> Memory:
        """All have gone back to a state that is none of these."""
        return Memory(self.by, self.rule)
