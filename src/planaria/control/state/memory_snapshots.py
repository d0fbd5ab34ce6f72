"""Snapshots that a replica's workers hold together in memory, from which lost stages can be restored. Pure.

The content follows from the steps started and committed, and from which workers are new; each worker derives it in the
same way (``recovery/snapshot_schedule.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from planaria.recovery.chain import Chain
from planaria.recovery.snapshot_schedule import SnapshotSchedule, SnapshotVersions

NONE_YET = SnapshotVersions()


@dataclass(frozen=True)
class MemorySnapshot:
    """The step of the snapshot, and the nodes whose workers hold their part of it."""

    strategy: str
    schedule: SnapshotSchedule
    versions: SnapshotVersions = NONE_YET
    nodes: frozenset[int] = frozenset()
    coming: frozenset[int] = frozenset()
    """nodes that will hold their part once the current generation is linked"""

    @classmethod
    def start(cls, chain: Chain) -> MemorySnapshot | None:
        """Return a replica's memory at the start, or None if no strategy of the chain keeps snapshots of all stages."""
        return None if chain.retaining is None else cls(*chain.retaining)

    @property
    def step(self) -> int:
        """Step of the newest snapshot that all could restore; -1: none."""
        return self.versions.retained

    def begin(self, step: int) -> MemorySnapshot:
        """Return the memory after all started a step."""
        return replace(self, versions=self.versions.begin(step, self.schedule))

    def commit(self, step: int, everybody: Collection[int]) -> MemorySnapshot:
        """Return the memory after all committed the started step."""
        if not self.versions.completes(step, self.schedule):
            return self
        return replace(self, versions=self.versions.commit(step, self.schedule), nodes=frozenset(everybody))

    def form(self, renewed: Collection[int], restored: Collection[int]) -> MemorySnapshot:
        """Return the memory of a new generation.

        ``renewed`` nodes receive other states, ``restored`` ones with their part of the snapshot.
        """
        return replace(self, nodes=self.nodes.difference(renewed), coming=frozenset(restored))

    def restart(self) -> MemorySnapshot:
        """Return the memory of a new generation that repeats the current step."""
        return replace(self, versions=self.versions.restart())

    def link(self, node: int) -> MemorySnapshot:
        """Return the memory after a node received its state."""
        if node not in self.coming:
            return self
        return replace(self, nodes=self.nodes | {node}, coming=self.coming - {node})

    def without(self, nodes: Collection[int]) -> MemorySnapshot:
        """Return the memory after the workers of these nodes died."""
        return replace(self, nodes=self.nodes.difference(nodes), coming=self.coming.difference(nodes))

    def resume(self, step: int, nodes: Collection[int]) -> MemorySnapshot:
        """Return the memory of a run that starts from the snapshot of ``step``, held in parts by these nodes."""
        return replace(self, versions=SnapshotVersions(step), nodes=frozenset(nodes))

    def void(self) -> MemorySnapshot:
        """Return the memory after all returned to an unrelated state."""
        return MemorySnapshot(self.strategy, self.schedule)
