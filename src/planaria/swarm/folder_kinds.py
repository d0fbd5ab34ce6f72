"""The swarm's kinds of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from planaria.common import documents
from planaria.config.folders import FIX, PAGE, FolderKind, ReportPage


class SwarmFolder(FolderKind):
    name, marker = "swarm", "peers"
    has_own_config = True
    functions: ClassVar = {
        "write_program": "planaria.swarm.commands.write_program:write_program",
        "export_peer": "planaria.swarm.trained_policy:export_peer",
    }

    def report(self, folder: Path) -> ReportPage:
        from planaria.swarm.commands.swarm import recorded_outcome
        from planaria.swarm.report.swarm_report import body, write_swarm_report

        config, outcome = recorded_outcome(folder)
        return ReportPage(
            folder / PAGE,
            lambda to: write_swarm_report(folder, config, outcome, to),
            lambda: body(folder, config, outcome),
        )

    def page_source(self, folder: Path) -> Any:
        from planaria.swarm.report.swarm_source import SwarmSource

        return SwarmSource(folder) if self.matches(folder) else None


class DrillFolder(FolderKind):
    name, marker = "drill", "drill.json"

    def report(self, folder: Path) -> ReportPage:
        from planaria.swarm.drill_arms import Drill
        from planaria.swarm.report.drill_report import body, write_drill_report

        drill = documents.read_model(folder / self.marker, Drill, fix=FIX)
        return ReportPage(folder / PAGE, lambda to: write_drill_report(drill, to), lambda: body(drill))


KINDS = (SwarmFolder(), DrillFolder())
