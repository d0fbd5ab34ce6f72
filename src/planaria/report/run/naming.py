"""Names of a run's nodes: by stage, by node if stages have several, and by replica."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from planaria.config.names import stages
from planaria.control.facts.events import RunStarted
from planaria.control.log.run_record import RunRecord


class Naming:
    """Names of one run's nodes."""

    def __init__(self, started: RunStarted | None = None) -> None:
        self.several = started is not None and started.max_replicas > 1
        """whether the run has several replicas"""
        self._scheduled = bool(started and started.arrangement)
        self._stage = started.stage_of if started and (self.several or self._scheduled) else {}
        self._replica = started.replica_of if started and self.several else {}

    def stage(self, node: int) -> int:
        return self._stage.get(node, node)

    def replica(self, node: int) -> int:
        return self._replica.get(node, 0)

    def nodes(self, replica: int) -> set[int]:
        """Return all nodes of one of several replicas."""
        return {node for node, owner in self._replica.items() if owner == replica}

    def name(self, nodes: Iterable[int]) -> str:
        """Return 'stage 2', 'stages 1, 3', 'node 14 of stage 3' or 'stages 0, 2 of replica 1'."""
        ordered = sorted(nodes)
        if self.several:
            stages_of = defaultdict(list)
            for node in ordered:
                stages_of[self.replica(node)].append(self.stage(node))
            return " and ".join(
                f"{stages(numbers)} of replica {replica}" for replica, numbers in sorted(stages_of.items())
            )
        if self._scheduled:
            return ", ".join(f"node {node} of stage {self._stage.get(node, '?')}" for node in ordered)
        return stages(ordered)

    def edge(self, low: int, high: int) -> str:
        """Return '0–1', by stages if there are several replicas."""
        return f"{self.stage(low)}–{self.stage(high)}" if self.several else f"{low}–{high}"

    def transit(self, source: int, target: int) -> str:
        """Return a figure's row of an edge: '0 → 1', or 'replica 2 · 0 → 1' by stages."""
        ends = f"{self.stage(source)} → {self.stage(target)}" if self.several else f"{source} → {target}"
        return f"replica {self.replica(source)} · {ends}" if self.several else ends

    def row(self, node: int) -> str:
        """Return a figure's row of a node."""
        if self.several:
            return f"replica {self.replica(node)} · stage {self.stage(node)}"
        return self.name([node]) if self._scheduled or node else "stage 0 (ends)"


def naming_of(record: RunRecord) -> Naming:
    """Return the names for a whole log, by its part with the most replicas; replicas keep their nodes."""
    return Naming(max((fact for _, fact in record.starts), key=lambda started: started.max_replicas, default=None))
