"""Which folders have a live page: those of runs, comparisons and swarms."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

from planaria.common.errors import UserError
from planaria.control.logs import EVENTS
from planaria.report.live_page.run_source import RunSource
from planaria.report.live_page.source import Source

OF_PARTS = (
    "planaria.swarm.report.swarm_source:SwarmSource",
    "planaria.lab.report.comparison_source:ComparisonSource",
)
"""sources of the other parts, which are imported only to look at a folder that holds no run"""
OTHERS = {"drill.json": "a drill's", "experts.json": "an ensemble's"}
"""file → whose folder it marks, where there is no page"""


def source_of(folder: Path) -> Source:
    """Return what the live page of ``folder`` is drawn from.

    :raises UserError: when the folder is of a known kind that has no page.
    """
    if not (folder / EVENTS).exists():
        for name, what in OTHERS.items():
            if (folder / name).exists():
                raise UserError(f"{folder}: is not a run's folder but {what}, which has no page; see its report.html")
        for kind in map(resolve_name, OF_PARTS):
            if kind.fits(folder):
                source: Source = kind(folder)
                return source
    return RunSource(folder)
