"""The path of each edge of a plan, as text and as a table."""

from __future__ import annotations

from collections.abc import Mapping

from planaria.pipeline.network.costs import MBIT
from planaria.planner.paths import CutBound
from planaria.planner.schedule import Schedule, SeveralPaths
from planaria.report.tables import Table

MAX_EDGES = 40
"""maximum number of edges in the table, the slowest ones"""


def table(schedule: Schedule, paths: SeveralPaths, old_paths: Mapping[tuple[int, int], str] | None = None) -> Table:
    """Return a table of the edges with the longest transfers of a step, each with its path and its rate.

    ``old_paths``: edge → its previous path.
    """
    names = [machine.name for machine in schedule.nodes]
    longest = sorted(paths.edges, key=lambda edge: -edge.size / edge.rate)
    rows = [
        [
            names[edge.source], names[edge.target],
            *([old_paths.get((edge.source, edge.target), "–")] if old_paths is not None else ()),
            edge.path, f"{edge.size / 1e6:.2f}", f"{edge.rate / MBIT:.4g}",
            f"{edge.size / edge.rate:.3g}",
        ]
        for edge in longest[:MAX_EDGES]
    ]  # fmt: skip
    title = "edges between sites, and their paths"
    if len(longest) > MAX_EDGES:
        title += f": the {MAX_EDGES} slowest of {len(longest)}; the schedule has all"
    head = [
        "from",
        "to",
        *(["path before"] if old_paths is not None else ()),
        "path",
        "MB a step",
        "Mbit/s, all sending",
        "seconds a step",
    ]
    return Table(title, head, rows, numbers_from=3 if old_paths is None else 4)


def summary(paths: SeveralPaths) -> str:
    """Return the load of the busiest link, and the lower bound on it for any choice of paths."""
    gap = CutBound(paths.least_s, ()).gap(paths.largest_s)
    cut = ", ".join(paths.cut[:3]) + (f" and {len(paths.cut) - 3} more" if len(paths.cut) > 3 else "")
    return (
        f"{len(paths.edges)} edges; the busiest link carries {paths.largest_s:.4g} s of a step, no choice less than "
        f"{paths.least_s:.4g} s (gap {gap:.1%}; cut: {cut or 'none'})"
    )
