"""The lab's kinds of folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from planaria.common import documents
from planaria.config.folders import FIX, PAGE, FolderKind, ReportPage


class Comparison(FolderKind):
    name, marker = "comparison", "comparison.json"

    def report(self, folder: Path) -> ReportPage:
        from planaria.lab.compare.race_results import ComparisonResults
        from planaria.lab.report.comparison import body, write_comparison

        results = documents.read_model(folder / self.marker, ComparisonResults, fix=FIX)
        return ReportPage(folder / PAGE, lambda to: write_comparison(results, to), lambda: body(results))


class Experts(FolderKind):
    name, marker = "experts", "results.json"

    def report(self, folder: Path) -> ReportPage:
        from planaria.lab.experts.experts_results import Results
        from planaria.lab.report.experts_report import body, write_experts_report

        results = documents.read_model(folder / self.marker, Results, fix=FIX)
        return ReportPage(folder / PAGE, lambda to: write_experts_report(results, to), lambda: body(results))

    def generate(
        self,
        folder: Path,
        prompt: str,
        max_new: int,
        temperature: float,
        top_k: int,
        seed: int,
        note: Callable[[str], object] | None = None,
    ) -> Iterator[str]:
        from planaria.lab.commands import ensemble

        return ensemble.stream(folder, prompt, max_new, temperature, top_k, seed, note)

    def evaluate(self, folder: Path, text: str | None) -> int:
        from planaria.lab.commands import ensemble

        return ensemble.evaluate(folder, text)

    def evaluate_exported(self, folder: Path, text: str | None) -> int:
        from planaria.lab.commands import ensemble

        return ensemble.evaluate_model(folder, text)

    def weigh_worst(self, folder: Path, tokens: int | None, floor: float | None, tolerance: float | None) -> int:
        from planaria.lab.commands import ensemble

        return ensemble.weigh_worst(folder, tokens, floor, tolerance)


KINDS = (Comparison(), Experts())
