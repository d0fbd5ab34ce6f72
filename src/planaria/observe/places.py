"""What to call the places of a run: stages, or nodes where a schedule gives stages several."""

from __future__ import annotations

from collections.abc import Iterable

from planaria.events import RunStarted


class Places:
    """Names for one run's nodes."""

    def __init__(self, started: RunStarted | None = None) -> None:
        self._stage = started.stage_of if started and started.arrangement else {}

    def stage(self, node: int) -> int:
        return self._stage.get(node, node)

    def name(self, nodes: Iterable[int]) -> str:
        """'stage 2', 'stages 1, 3'; or 'node 14 of stage 3'."""
        ordered = sorted(nodes)
        if self._stage:
            return ", ".join(f"node {node} of stage {self._stage.get(node, '?')}" for node in ordered)
        return stages(ordered)

    def row(self, node: int) -> str:
        """A row of a figure."""
        return self.name([node]) if self._stage or node else "stage 0 (ends)"


def stages(numbers: Iterable[int]) -> str:
    """'stage 2', 'stages 1, 3'."""
    ordered = sorted(numbers)
    return f"stage{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered))}"
