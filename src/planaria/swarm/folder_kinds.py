"""The swarm's kinds of folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planaria.common import documents
from planaria.config.folders import FIX, PAGE, Choice, FolderKind, ReportPage, Strategy


class Swarm(FolderKind):
    name, marker = "swarm", "peers"
    has_own_config = True

    def report(self, folder: Path) -> ReportPage:
        from planaria.swarm.commands.swarm import recorded_outcome
        from planaria.swarm.report.swarm_report import body, write_swarm_report

        config, outcome = recorded_outcome(folder)
        return ReportPage(
            folder / PAGE,
            lambda to: write_swarm_report(folder, config, outcome, to),
            lambda: body(folder, config, outcome),
        )

    def write_program(
        self,
        folder: Path,
        task: str,
        problem: int,
        strategy: Strategy,
        tokens: int,
        top_k: int,
        seed: int,
        choose: Choice,
    ) -> int:
        from planaria.swarm.commands.write_program import write_program

        return write_program(folder, task, problem, strategy, tokens, top_k, seed, choose)

    def export_peer(self, folder: Path, peer: str, to: Path, number: int | None, note: Callable[[str], None]) -> Path:
        from planaria.swarm.trained_policy import export_peer

        return export_peer(folder, peer, to, number, note)


class Drill(FolderKind):
    name, marker = "drill", "drill.json"

    def report(self, folder: Path) -> ReportPage:
        from planaria.swarm import drill as drills
        from planaria.swarm.report.drill_report import body, write_drill_report

        drill = documents.read_model(folder / self.marker, drills.Drill, fix=FIX)
        return ReportPage(folder / PAGE, lambda to: write_drill_report(drill, to), lambda: body(drill))


KINDS = (Swarm(), Drill())
