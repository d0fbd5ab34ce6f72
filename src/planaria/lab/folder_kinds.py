"""The lab's kinds of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from planaria.common import documents
from planaria.config.folders import FIX, PAGE, FolderKind, ReportPage


class ComparisonFolder(FolderKind):
    name, marker = "comparison", "comparison.json"

    def report(self, folder: Path) -> ReportPage:
        from planaria.lab.compare.race_results import ComparisonResults
        from planaria.lab.report.comparison import body, write_comparison

        results = documents.read_model(folder / self.marker, ComparisonResults, fix=FIX)
        return ReportPage(folder / PAGE, lambda to: write_comparison(results, to), lambda: body(results))

    def page_source(self, folder: Path) -> Any:
        from planaria.lab.report.comparison_source import ComparisonSource

        return ComparisonSource(folder) if ComparisonSource.fits(folder) else None


class ExpertsFolder(FolderKind):
    name, marker = "experts", "results.json"
    functions: ClassVar = {
        "complete": "planaria.lab.commands.ensemble:stream",
        "evaluate": "planaria.lab.commands.ensemble:evaluate",
        "evaluate_exported": "planaria.lab.commands.ensemble:evaluate_model",
        "weigh_worst": "planaria.lab.commands.ensemble:weigh_worst",
    }

    def matches(self, folder: Path) -> bool:
        return super().matches(folder) or (folder / "experts.json").exists()

    def report(self, folder: Path) -> ReportPage:
        from planaria.lab.experts.experts_results import Results
        from planaria.lab.report.experts_report import body, write_experts_report

        results = documents.read_model(folder / self.marker, Results, fix=FIX)
        return ReportPage(folder / PAGE, lambda to: write_experts_report(results, to), lambda: body(results))


KINDS = (ComparisonFolder(), ExpertsFolder())
