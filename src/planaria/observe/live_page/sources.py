"""What a folder holds that has a page: a run, a comparison or a swarm."""

from __future__ import annotations

from pathlib import Path

from planaria.errors import UserError
from planaria.observe.live_page.comparison_source import ComparisonSource, is_comparison
from planaria.observe.live_page.run_source import RunSource
from planaria.observe.live_page.source import Source
from planaria.observe.live_page.swarm_source import SwarmSource, is_swarm
from planaria.record.logs import EVENTS

OTHERS = {"drill.json": "a drill's", "experts.json": "an ensemble's"}
"""what is in folders that have no page"""


def source_of(folder: Path) -> Source:
    """What is in a folder.

    :raises UserError: when it is none of these, naming what it is, if that is known.
    """
    if not (folder / EVENTS).exists():
        for name, what in OTHERS.items():
            if (folder / name).exists():
                raise UserError(f"{folder}: is not a run's folder but {what}, which has no page; see its report.html")
        if is_swarm(folder):
            return SwarmSource(folder)
        if is_comparison(folder):
            return ComparisonSource(folder)
    return RunSource(folder)
