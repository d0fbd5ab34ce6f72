"""Full routing: every microbatch visits every stage in natural order."""

from __future__ import annotations


def full(stages: int, microbatches: int) -> list[tuple[int, ...]]:
    """Routes ``0 → 1 → … → stages → 0`` for every microbatch; the same at every step."""
    return [(0, *range(1, stages + 1), 0)] * microbatches
