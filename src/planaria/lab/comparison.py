"""A comparison as a program asks for it, and what it found as an object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import plotly.graph_objects as go

from planaria.config.consent import allowing
from planaria.config.shipped import find
from planaria.faults.blows import Lost
from planaria.lab.compare.race_results import Compared
from planaria.lab.comparing import NUMBERS, REPORT, Asked, raced
from planaria.lab.report.comparison import body
from planaria.lab.report.comparison_table import latex, numbers
from planaria.lab.report.for_paper import write_for_paper
from planaria.report import page
from planaria.runtime.configuration import Settings, named
from planaria.runtime.run import Table, figure_of, tabulated


def compare(
    recipe: str | Path,
    *,
    seeds: Sequence[int] | None = None,
    arms: Sequence[str] | None = None,
    together: float | None = None,
    lost: Lost | None = None,
    progress: bool = True,
    settings: Settings | None = None,
    allow_code: bool = False,
    **short: object,
) -> ComparisonResult:
    """Race the arms of a recipe's ``[compare]`` table on the same failures, as ``planaria compare`` does.

    What an earlier call or command has raced already, with the same settings, is not raced again.

    :param recipe: a recipe's name or file.
    :param seeds: instead of the recipe's, each with its weights, data order and failures.
    :param arms: of the recipe's arms, these alone, and recovery strategies by name or as ``module:Class``; the
        fault-free arm is always there. With strategies alone, the recipe needs no ``[compare]`` table.
    :param together: the chance that a failure takes the next stage too, instead of the recipe's
        ``compare.trace.together``.
    :param lost: what one failure takes, instead of the recipe's ``compare.trace.lost``: ``stage``, ``adjacent`` (a
        stage and the next one), ``machine`` or ``region``.
    :param progress: show a bar on a terminal, and lines elsewhere.
    :param settings: dotted name → value, for all arms; ``short`` are the same by their last word (``steps=200``).
    :param allow_code: import modules that the recipe or ``arms`` name as ``module:Class``, which runs their code.
    :raises UserError: before anything runs, when something that was given is wrong.
    :raises RunStopped: when an arm failed; those that are done stay done.
    """
    say: Callable[[str], None] | None = print if progress else None
    asked = Asked(find(str(recipe)), named(settings, short), seeds, arms, trace_laid(together, lost))
    with allowing(allow_code):
        return ComparisonResult(*raced(asked, not progress, say))


def trace_laid(together: float | None, lost: Lost | None) -> dict[str, object]:
    """What takes the place of settings in compare.trace. One way to lose several takes that of the others."""
    laid: dict[str, object] = {} if together is None else {"together": together}
    if lost is not None:
        laid["lost"], laid["forbid_adjacent"] = lost, False
        laid.setdefault("together", 0.0)
    return laid


class ComparisonResult:
    """What a comparison found: every arm over all seeds, on the way to the fault-free arm's loss."""

    def __init__(self, found: Compared, folder: Path) -> None:
        self.found = found
        """every number"""
        self.folder = folder

    @property
    def report(self) -> Path:
        """The HTML page in :attr:`folder`."""
        return self.folder / REPORT

    @property
    def numbers(self) -> Path:
        """:attr:`found` as JSON in :attr:`folder`."""
        return self.folder / NUMBERS

    def table(self) -> Table:
        """One row an arm, best first: means over the seeds with the least and most; None where a seed has no number.

        Columns: ``arm``; of ``ticks`` (steps to the target), ``ratio`` (to the fault-free arm's), ``reset_ratio`` (to
        those of the control that loses moments alone), ``hours``,
        ``hours_ratio``, ``machine_hours``, ``final`` (last smoothed validation loss, nats per token) and ``failures``
        the mean, and ``NAME_least`` and ``NAME_most``; of the ratios ``NAME_low95`` and ``NAME_high95``, their
        bootstrap intervals from five seeds on; ``traffic`` and ``memory`` that copies take, as shares; ``missed``
        seeds; ``control``: is it one? A pandas data frame where pandas is installed, otherwise a list of dicts.
        """
        return tabulated(numbers(self.found))

    def runs(self) -> Table:
        """One row a run, arm by arm and seed by seed: ``arm``, ``seed``, and every number that was measured of it."""
        return tabulated([{"arm": arm.name} | run.model_dump() for arm in self.found.ranked() for run in arm.runs])

    def to_latex(self) -> str:
        """The table that the terminal shows, mean [least … most], as LaTeX for a paper (it needs ``booktabs``)."""
        return latex(self.found)

    def to_html(self) -> str:
        """The report: one page that works offline."""
        return page.document(f"{self.found.name} compared · planaria", body(self.found))

    def write(self, folder: Path) -> list[str]:
        """Write what a paper needs into ``folder``, and return the files' names: the table as CSV and LaTeX, every run
        and every curve as CSV, and, where matplotlib is installed, losses over steps and hours and the hours to the
        target as PDF and SVG.

        :raises UserError: when the folder cannot be written.
        """
        return write_for_paper(self.found, folder)

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """Every figure of the report by name: ``loss``, ``hours``, ``prices``, ``winners``, ``failures0``, …"""
        return page.figures(body(self.found))

    def figure(self, name: str) -> go.Figure:
        """One of :attr:`figures`.

        :raises UserError: when the report has no such figure, naming the nearest.
        """
        return figure_of(self.figures, name)

    def __repr__(self) -> str:
        return f"<ComparisonResult {self.folder}: {len(self.found.arms)} arms, {len(self.found.failures)} seeds>"
