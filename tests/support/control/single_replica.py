"""A fleet of one replica at work."""

from __future__ import annotations

from typing import Any

from planaria.control.facts import events as e

STAGES = 4

PAIRS = [(s, s + 1) for s in range(STAGES)] + [(0, STAGES)]


def started(**changed: Any) -> e.RunStarted:
    plain: dict[str, Any] = {
        "name": "run", "seed": 1, "stages": STAGES, "steps": 4, "first_step": 0, "samples_per_step": 8,
        "wall_time": 0.0, "spares": 1, "extra_edges": PAIRS, "routes": [[0, 1, 2, 3, 4, 0], [0, 2, 1, 4, 3, 0]],
    }  # fmt: skip
    return e.RunStarted.model_validate(plain | changed)


SHARED: dict[str, Any] = {
    "arrangement": [[0, 6], [5, 1], [2, 7], [3], [4]],
    "routes": [[0, 1, 3, 4, 0], [6, 5, 2, 3, 6], [0, 5, 7, 4, 0], [6, 2, 1, 4, 6]],
    "extra_edges": [],
}
"""a schedule: two data nodes, stages with two nodes and with one"""
