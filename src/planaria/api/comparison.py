"""A comparison as a program asks for it, and what it found as an object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import plotly.graph_objects as go

from planaria.api.comparing import NUMBERS, REPORT, raced
from planaria.api.recipes import Settings, named
from planaria.api.table import Table, figure_of, tabulated
from planaria.compare.race_results import Compared
from planaria.observe import page
from planaria.observe.trials.comparison import MACHINES, SPREADS, body
from planaria.observe.trials.latex import latex
from planaria.shipped import find


def compare(
    recipe: str | Path,
    *,
    seeds: Sequence[int] | None = None,
    arms: Sequence[str] | None = None,
    together: float | None = None,
    progress: bool = True,
    settings: Settings | None = None,
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
    :param progress: show a bar on a terminal, and lines elsewhere.
    :param settings: dotted name → value, for all arms; ``short`` are the same by their last word (``steps=200``).
    :raises UserError: before anything runs, when something that was given is wrong.
    :raises RunStopped: when an arm failed; those that are done stay done.
    """
    say: Callable[[str], None] | None = print if progress else None
    file, given = find(str(recipe)), named(settings, short)
    return ComparisonResult(*raced(file, given, seeds, arms, not progress, say, together))


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

        Columns: ``arm``; of ``ticks`` (steps to the target), ``ratio`` (to the fault-free arm's), ``hours``,
        ``hours_ratio``, ``machine_hours``, ``final`` (last smoothed validation loss, nats per token) and ``failures``
        the mean, and ``NAME_least`` and ``NAME_most``; ``traffic`` and ``memory`` that copies take, as shares;
        ``missed`` seeds. A pandas data frame where pandas is installed, otherwise a list of dicts.
        """
        rows: list[dict[str, object]] = []
        for arm in self.found.ranked():
            row: dict[str, object] = {"arm": arm.name}
            for name in (*(of for of, _ in (SPREADS | MACHINES).values()), "failures"):
                mean, least, most = arm.spread(name) or (None, None, None)
                row |= {name: mean, f"{name}_least": least, f"{name}_most": most}
            rows.append(row | {"traffic": arm.traffic, "memory": arm.memory, "missed": arm.missed})
        return tabulated(rows)

    def runs(self) -> Table:
        """One row a run, arm by arm and seed by seed: ``arm``, ``seed``, and every number that was measured of it."""
        return tabulated([{"arm": arm.name} | run.model_dump() for arm in self.found.ranked() for run in arm.runs])

    def to_latex(self) -> str:
        """The table that the terminal shows, mean [least … most], as LaTeX for a paper (it needs ``booktabs``)."""
        return latex(self.found)

    def to_html(self) -> str:
        """The report: one page that works offline."""
        return page.document(f"{self.found.name} compared · planaria", body(self.found))

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
