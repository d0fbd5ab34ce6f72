"""Progress of a run: a display with a bar, the newest numbers and a line per fault and recovery; callbacks per step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.text import Text

from planaria.control.facts.decisions import Decision, Form
from planaria.control.facts.events import Event, RunStarted
from planaria.control.log.run_record import Metric, StepMetric, ValidationMetric
from planaria.report.observe.bars import columns
from planaria.report.phrases import format_count
from planaria.report.run.event_lines import EventLine, Narrator, Tone

STYLES: dict[Tone, str] = {
    "fault": "yellow", "slow": "yellow", "loss": "red", "recovery": "green", "rollback": "magenta",
    "relink": "cyan", "note": "dim",
}  # fmt: skip


class NoProgress:
    """A progress display that shows nothing."""

    def start(self, total: int, first: int) -> None:
        """Start at step ``first`` of ``total``, and show it."""

    def show(self) -> None:
        """Begin to show a run that was recalled."""

    def on_fact(self, t: float, fact: Event | Decision) -> None:
        """Process an event or decision at monotonic time ``t``."""

    def on_metric(self, metric: Metric) -> None:
        """Process the metrics of a step or validation."""

    def recall(self, t: float, fact: Event | Decision) -> None:
        """Process an event or decision of an earlier controller without showing it."""

    def stop(self) -> None:
        """End the display."""


class Progress(NoProgress):
    """Shows the run on ``stream``: a live bar on a terminal, elsewhere a line per tenth of the run."""

    def __init__(self, stream: TextIO | None = None, bar: bool = True) -> None:
        """:param bar: False: no bar, even on a terminal"""
        self._stream = stream or sys.stdout
        self._has_bar = bar and self._stream.isatty()
        self._narrator = Narrator()
        self._members = self._narrator.members
        self._total = self._done = 0
        self._printed = 0
        """tenths of the run that plain output has reported"""
        self._numbers: dict[str, str] = {}
        self._bar: RichProgress | None = None

    def start(self, total: int, first: int) -> None:
        self._total, self._done = total, first
        self._printed = self._tenth()
        self.show()

    def show(self) -> None:
        if not self._has_bar:
            return
        self._bar = RichProgress(
            *columns("step {task.completed}/{task.total}", first=True), console=Console(file=self._stream), expand=True
        )
        self._bar.add_task("train", total=self._total, completed=self._done, parts=())
        self._bar.start()

    def on_fact(self, t: float, fact: Event | Decision) -> None:
        self._show(self._narrator.describe(t, fact))
        self._done = self._members.progress
        if isinstance(fact, Form) and fact.is_rollback:
            self._printed = self._tenth()
        self._refresh()

    def recall(self, t: float, fact: Event | Decision) -> None:
        if isinstance(fact, RunStarted):
            self._total = fact.steps
        self._narrator.describe(t, fact)
        self._done = self._members.progress
        self._printed = self._tenth()

    def on_metric(self, metric: Metric) -> None:
        if isinstance(metric, StepMetric):
            self._numbers["loss"] = f"loss {metric.loss:.4f}"
            self._numbers["speed"] = f"{metric.tokens_per_s:,.0f} tokens/s"
        else:
            self._numbers["validation"] = f"validation {metric.val_loss:.4f} (step {metric.step})"
        if self._bar is None and self._tenth() > self._printed:
            self._printed = self._tenth()
            self._print("  ".join((f"step {self._done}/{self._total}", *self._summary())))
        self._refresh()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _tenth(self) -> int:
        return 10 * self._done // max(self._total, 1)

    def _summary(self) -> list[str]:
        """Return the newest numbers, the most important first."""
        members = self._members
        workers = f"{len(members.holders)} workers, {format_count(members.spares, 'spare')}" if members.alive else ""
        order = (self._numbers.get(name) for name in ("loss", "validation", "speed"))
        return [text for text in (*order, workers) if text]

    def _refresh(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, parts=self._summary())

    def _show(self, line: EventLine | None) -> None:
        if line is None:
            return
        if self._bar is not None:
            self._bar.console.print(Text(str(line), style=STYLES[line.tone]), soft_wrap=True)
        else:
            self._print(str(line))

    def _print(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


@dataclass(frozen=True)
class Step:
    """One committed step of a run. A step undone by a rollback is reported again."""

    step: int
    """its number, from 0"""
    steps: int
    """steps of the whole run"""
    loss: float
    """nats per token, before the update; the mean over replicas"""
    tokens_per_s: float
    """since the previous step, recoveries included"""
    grad_norm: Mapping[int, float]
    """stage → L2 norm of its gradient before clipping"""
    val_loss: float | None
    """loss of the newest validation, nats per token; None before the first"""


class StepListener(NoProgress):
    """A display that forwards everything to another one, and steps to a callback."""

    def __init__(self, display: NoProgress, callback: Callable[[Step], object]) -> None:
        """``callback`` is not called again after it has raised an error."""
        self._display, self._callback = display, callback
        self._steps = 0
        self._validated: float | None = None
        self.error: Exception | None = None
        """error of the callback; the run should stop"""

    def start(self, total: int, first: int) -> None:
        self._steps = total
        self._display.start(total, first)

    def on_fact(self, t: float, fact: Event | Decision) -> None:
        self._display.on_fact(t, fact)

    def show(self) -> None:
        self._display.show()

    def recall(self, t: float, fact: Event | Decision) -> None:
        if isinstance(fact, RunStarted):
            self._steps = fact.steps
        self._display.recall(t, fact)

    def on_metric(self, metric: Metric) -> None:
        self._display.on_metric(metric)
        if isinstance(metric, ValidationMetric):
            self._validated = metric.val_loss
            return
        if self.error is not None:
            return
        step = Step(metric.step, self._steps, metric.loss, metric.tokens_per_s, metric.grad_norm, self._validated)
        try:
            self._callback(step)
        except Exception as error:  # raised in the program once the run is saved
            self.error = error

    def stop(self) -> None:
        self._display.stop()
