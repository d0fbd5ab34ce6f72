"""Python interface of comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import plotly.graph_objects as go

from planaria.config.consent import permit_code
from planaria.config.shipped import find
from planaria.faults.failure_groups import FailureDomain
from planaria.lab.compare.race_results import ComparisonResults
from planaria.lab.compare.run_comparison import NUMBERS, REPORT, ComparisonRequest, run_remaining_races
from planaria.lab.report.comparison import body
from planaria.lab.report.comparison_table import latex, numbers
from planaria.lab.report.for_paper import write_for_paper
from planaria.report import page
from planaria.runtime.api.configure import Settings, merge_settings
from planaria.runtime.api.run import Table, figure_of, to_table


def compare(
    recipe: str | Path,
    *,
    seeds: Sequence[int] | None = None,
    arms: Sequence[str] | None = None,
    adjacent_probability: float | None = None,
    failure_domain: FailureDomain | None = None,
    progress: bool = True,
    settings: Settings | None = None,
    allow_code: bool = False,
    **short: object,
) -> ComparisonResult:
    """Race the arms of a recipe's ``[compare]`` table under the same failures, as ``planaria compare`` does.

    Races that an earlier call or command has finished with the same settings are not repeated.

    :param recipe: a recipe's name or file.
    :param seeds: replace the recipe's; each determines weights, data order and failures.
    :param arms: race only these arms; recovery strategies, by name or as ``module:Class``, count as arms. The
        fault-free arm is always raced. With strategies alone, the recipe needs no ``[compare]`` table.
    :param adjacent_probability: probability that a failure takes the next stage too; replaces
        ``compare.trace.adjacent_probability``.
    :param failure_domain: what one failure takes: ``stage``, ``adjacent`` (a stage and the next one), ``machine`` or
        ``region``; replaces ``compare.trace.failure_domain``.
    :param progress: show a bar on a terminal, and lines elsewhere.
    :param settings: dotted name → value, for all arms; ``short`` takes their last words (``steps=200``).
    :param allow_code: import modules that the recipe or ``arms`` name as ``module:Class``, which runs their code.
    :raises UserError: before anything runs, when an argument or setting is invalid.
    :raises RunStopped: when an arm failed; finished races are kept.
    """
    notify: Callable[[str], None] | None = print if progress else None
    requested = ComparisonRequest(
        find(str(recipe)),
        merge_settings(settings, short),
        seeds,
        arms,
        trace_overrides(adjacent_probability, failure_domain),
    )
    with permit_code(allow_code):
        return ComparisonResult(*run_remaining_races(requested, not progress, notify))


def trace_overrides(adjacent_probability: float | None, failure_domain: FailureDomain | None) -> dict[str, object]:
    """Return overrides of ``compare.trace``. A failure domain replaces the recipe's settings for adjacent failures."""
    laid: dict[str, object] = {} if adjacent_probability is None else {"adjacent_probability": adjacent_probability}
    if failure_domain is not None:
        laid["failure_domain"], laid["forbid_adjacent"] = failure_domain, False
        laid.setdefault("adjacent_probability", 0.0)
    return laid


class ComparisonResult:
    """Results of a comparison: every arm over all seeds, until it reaches the fault-free arm's loss."""

    def __init__(self, results: ComparisonResults, folder: Path) -> None:
        self.results = results
        """all numbers"""
        self.folder = folder

    @property
    def report(self) -> Path:
        """The HTML page in :attr:`folder`."""
        return self.folder / REPORT

    @property
    def numbers(self) -> Path:
        """:attr:`results` as JSON in :attr:`folder`."""
        return self.folder / NUMBERS

    def table(self) -> Table:
        """Return one row per arm, best first: means over seeds with minimum and maximum, or None if a seed has no
        number.

        Columns: ``arm``; the mean of ``ticks`` (steps to the target), ``ratio`` (to the fault-free arm's),
        ``reset_ratio`` (to those of the control that loses moments alone), ``hours``, ``hours_ratio``,
        ``machine_hours``, ``final`` (last smoothed validation loss, nats per token) and ``failures``, each with
        ``NAME_least`` and ``NAME_most``; ``NAME_low95`` and ``NAME_high95`` of the ratios, their bootstrap intervals
        for five seeds or more; ``traffic`` and ``memory`` of copies, as shares; ``missed`` seeds; ``control``: whether
        the arm is one. A pandas data frame if pandas is installed, otherwise a list of dicts.
        """
        return to_table(numbers(self.results))

    def runs(self) -> Table:
        """Return one row per run, by arm and seed: ``arm``, ``seed``, and every number measured."""
        return to_table([{"arm": arm.name} | run.model_dump() for arm in self.results.ranked() for run in arm.runs])

    def to_latex(self) -> str:
        """Return the terminal's table, mean [least … most], as LaTeX (requires ``booktabs``)."""
        return latex(self.results)

    def to_html(self) -> str:
        """Return the report: one page that works offline."""
        return page.document(f"{self.results.name} compared · planaria", body(self.results))

    def write(self, folder: Path) -> list[str]:
        """Write results for a paper into ``folder``, and return the files' names.

        Files: the table as CSV and LaTeX; every run and curve as CSV; and, if matplotlib is installed, losses over
        steps and hours, the hours to the target, and losses at equal costs if replicas exchange, as PDF and SVG.

        :raises UserError: when the folder is not writable.
        """
        return write_for_paper(self.results, folder)

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """All figures of the report by name: ``loss``, ``hours``, ``prices``, ``winners``, ``failures0``, …"""
        return page.figures(body(self.results))

    def figure(self, name: str) -> go.Figure:
        """Return one of :attr:`figures`.

        :raises UserError: when the report has no such figure, naming the nearest.
        """
        return figure_of(self.figures, name)

    def __repr__(self) -> str:
        return f"<ComparisonResult {self.folder}: {len(self.results.arms)} arms, {len(self.results.failures)} seeds>"
