"""A run as an object: what its folder tells, as numbers, a table, figures and a model that can be asked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from planaria.common.errors import UserError, nearest
from planaria.config.consent import allowing
from planaria.config.schema import RunConfig
from planaria.control.logs import RunRecord, read_run
from planaria.report import page
from planaria.report.run.recovery_timeline import RecoveryTiming, recoveries
from planaria.report.run.report import body, write_report
from planaria.report.run.run_verdict import outcome
from planaria.report.run.summary import measured, summary
from planaria.runtime.complete import complete
from planaria.runtime.engine import runs
from planaria.runtime.engine.own_classes import own_classes
from planaria.runtime.foreign import export_run

Table = Any
"""a ``pandas.DataFrame``, or ``list[dict[str, object]]`` where pandas is not installed"""
MODEL = "model"
"""the folder in a run's that a finished run is exported to"""


def load(folder: str | Path, *, allow_code: bool = False) -> Run:
    """Return the run in a folder such as ``runs/demo``, finished or still training.

    :param allow_code: import modules that the run names as ``module:Class``, which runs their code.
    :raises UserError: if the folder is not a run, was changed since, or names a class that cannot be imported.
    """
    run = Run(Path(folder))
    if allow_code:
        with allowing():
            own_classes(run.config)
    return run


class Run:
    """A run that was trained, or is being trained. Its folder is read once, when something is first asked."""

    def __init__(self, folder: Path) -> None:
        """:raises UserError: when the folder is no run's, or not as the run wrote it."""
        self.folder = folder
        self.config: RunConfig = runs.config_of(folder)

    @cached_property
    def record(self) -> RunRecord:
        """Everything that the folder tells: events, decisions and metrics, as reports are drawn from them."""
        return read_run(self.folder)

    @property
    def outcome(self) -> str:
        """How it ended: "finished", or what it was ended by, with the reason."""
        return outcome(self.record)

    @property
    def losses(self) -> list[float]:
        """Training loss of each step in order, nats per token. Of a step that was done again, the last one counts."""
        last = {metric.step: metric.loss for metric in self.record.trained}
        return [last[step] for step in sorted(last)]

    @property
    def validations(self) -> dict[int, float]:
        """Step after which was validated → loss, nats per token."""
        return {metric.step: metric.val_loss for metric in self.record.validated}

    @property
    def recoveries(self) -> list[RecoveryTiming]:
        """Every recovery in order: who was lost, what became of it, and the seconds that each part of it took."""
        return recoveries(self.record)

    def table(self) -> Table:
        """One row a step: ``step``, ``loss``, ``tokens_per_s``, ``val_loss``; empty where nothing was measured.

        A pandas data frame where pandas is installed, otherwise a list of dicts.
        """
        rows: dict[int, dict[str, object]] = {}
        for metric in self.record.metrics:
            row = rows.setdefault(metric.step, dict.fromkeys(("step", "loss", "tokens_per_s", "val_loss")))
            row["step"] = metric.step
            row |= {name: value for name in row if (value := getattr(metric, name, None)) is not None}
        return tabulated([rows[step] for step in sorted(rows)])

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """Every figure of the run's report by name: ``loss``, ``step``, ``recoveries``, ``holders``, ``bytes``, …"""
        return page.figures(body(self.record))

    def figure(self, name: str) -> go.Figure:
        """One of :attr:`figures`.

        :raises UserError: when the report of this run has no such figure, naming the nearest.
        """
        return figure_of(self.figures, name)

    def summary(self) -> str:
        """What the command prints at the end: losses, and a line for every fault."""
        return "\n".join(summary(self.record))

    def report(self, to: str | Path | None = None) -> Path:
        """Write the run's report, one HTML page that works offline; its path (``folder/report.html`` unless given).

        :raises UserError: when it cannot be written.
        """
        return write_report(self.folder, None if to is None else Path(to))

    def complete(self, prompt: str, max_new: int = 60, temperature: float = 0.7, top_k: int = 40, seed: int = 0) -> str:
        """``prompt`` and up to ``max_new`` tokens that the newest whole checkpoint adds to it.

        ``temperature`` 0 takes the likeliest token; otherwise one is drawn from the ``top_k`` likeliest.

        :raises UserError: when nothing is saved yet.
        """
        return complete(self.folder, prompt, max_new, temperature, top_k, seed)

    def export(self, to: str | Path) -> Path:
        """Write the newest whole checkpoint as a Hugging Face model into the folder ``to``.

        :raises UserError: when nothing is saved yet, or it cannot be written.
        """
        return export_run(self.folder, Path(to))

    def __repr__(self) -> str:
        told = measured(self.record)
        loss = "" if told.loss is None else f", loss {told.loss:.4f}"
        return f"<Run {self.folder}: {self.outcome}, {told.steps} steps{loss}, {len(self.recoveries)} recoveries>"


def tabulated(rows: list[dict[str, object]]) -> Table:
    """Return rows with the same keys as a data frame if pandas is installed."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def figure_of(figures: Mapping[str, go.Figure], name: str) -> go.Figure:
    """Return the figure of this name.

    :raises UserError: if there is none, naming the nearest.
    """
    if name not in figures:
        raise UserError(f"{name}: the report has no such figure; {nearest(name, figures)}")
    return figures[name]
