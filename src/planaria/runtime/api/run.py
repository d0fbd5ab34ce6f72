"""A run as an object: its numbers, table, figures, and model, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from planaria.common.errors import UserError, suggestion
from planaria.config.consent import permit_code
from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.report import page
from planaria.report.run.recoveries import recoveries
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.run.report import body, write_report
from planaria.report.run.summary import key_metrics, outcome, summary
from planaria.runtime.api.completer import complete
from planaria.runtime.api.import_export import export_run
from planaria.runtime.custom_classes import custom_classes
from planaria.runtime.preparation import run_folders

Table = Any
"""a ``pandas.DataFrame``, or ``list[dict[str, object]]`` without pandas"""
MODEL = "model"
"""folder of the exported model of a finished run, in the run's folder"""


def load(folder: str | Path, *, allow_code: bool = False) -> Run:
    """Return the run in a folder such as ``runs/demo``, finished or still training.

    :param allow_code: import modules that the run names as ``module:Class``, which runs their code.
    :raises UserError: if the folder is not a run, was changed since, or names a class that cannot be imported.
    """
    run = Run(Path(folder))
    if allow_code:
        with permit_code():
            custom_classes(run.config)
    return run


class Run:
    """A run, finished or in training. Its folder is read once, on first use."""

    def __init__(self, folder: Path) -> None:
        """Open a run; UserError if the folder is not a run, or was changed."""
        self.folder = folder
        self.config: RunConfig = run_folders.config_of(folder)

    @cached_property
    def record(self) -> RunRecord:
        """The folder's contents: events, decisions and metrics, from which reports are drawn."""
        return read_run(self.folder)

    @property
    def outcome(self) -> str:
        """ "finished", or the outcome with its reason."""
        return outcome(self.record)

    @property
    def losses(self) -> list[float]:
        """Training loss of each step in order, in nats per token; the last one of a repeated step."""
        last = {metric.step: metric.loss for metric in self.record.trained}
        return [last[step] for step in sorted(last)]

    @property
    def validations(self) -> dict[int, float]:
        """Step → validation loss after it, in nats per token."""
        return {metric.step: metric.val_loss for metric in self.record.validated}

    @property
    def recoveries(self) -> list[RecoveryTiming]:
        """All recoveries in order: lost workers, outcome, and the seconds of each part."""
        return recoveries(self.record)

    def table(self) -> Table:
        """Return one row per step: ``step``, ``loss``, ``tokens_per_s``, ``val_loss``, with None where not measured.

        A pandas data frame if pandas is installed, otherwise a list of dicts.
        """
        rows: dict[int, dict[str, object]] = {}
        for metric in self.record.metrics:
            row = rows.setdefault(metric.step, dict.fromkeys(("step", "loss", "tokens_per_s", "val_loss")))
            row["step"] = metric.step
            row |= {name: value for name in row if (value := getattr(metric, name, None)) is not None}
        return to_table([rows[step] for step in sorted(rows)])

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """The figures of the run's report by name: ``loss``, ``step``, ``recoveries``, ``holders``, ``bytes``, …"""
        return page.figures(body(self.record))

    def figure(self, name: str) -> go.Figure:
        """Return one of :attr:`figures`; UserError if the report has no such figure; the message names the nearest."""
        return figure_of(self.figures, name)

    def summary(self) -> str:
        """Return what the command prints at the end: losses, and a line for every fault."""
        return "\n".join(summary(self.record))

    def report(self, to: str | Path | None = None) -> Path:
        """Write the run's report, one HTML page that works offline; return its path (default: ``folder/report.html``).

        :raises UserError: if it cannot be written.
        """
        return write_report(self.folder, None if to is None else Path(to))

    def complete(self, prompt: str, max_new: int = 60, temperature: float = 0.7, top_k: int = 40, seed: int = 0) -> str:
        """Return ``prompt`` and up to ``max_new`` tokens of its completion by the newest whole checkpoint.

        With ``temperature`` 0 the likeliest token is taken; otherwise one of the ``top_k`` likeliest is drawn.
        :raises UserError: if there is no checkpoint.
        """
        return complete(self.folder, prompt, max_new, temperature, top_k, seed)

    def export(self, to: str | Path, merge: bool = False) -> Path:
        """Export the newest whole checkpoint as a Hugging Face model to the folder ``to``.

        With ``merge``, LoRA adapters are added to the weights of their base model.

        :raises UserError: if there is no checkpoint, or the folder cannot be written.
        """
        return export_run(self.folder, Path(to), merge=merge)

    def __repr__(self) -> str:
        metrics = key_metrics(self.record)
        loss = "" if metrics.loss is None else f", loss {metrics.loss:.4f}"
        return f"<Run {self.folder}: {self.outcome}, {metrics.steps} steps{loss}, {len(self.recoveries)} recoveries>"


def to_table(rows: list[dict[str, object]]) -> Table:
    """Return rows with the same keys as a data frame if pandas is installed."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def figure_of(figures: Mapping[str, go.Figure], name: str) -> go.Figure:
    """Return the figure of this name; UserError if there is none, naming the nearest."""
    if name not in figures:
        raise UserError(f"{name}: the report has no such figure; {suggestion(name, figures)}")
    return figures[name]
