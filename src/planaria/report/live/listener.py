"""A program that listens to its run: a function hears of every committed step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planaria.control.decisions import Decision
from planaria.control.events import Event
from planaria.control.run_record import Metric, ValidationMetric
from planaria.report.live.progress import Quiet


@dataclass(frozen=True)
class Step:
    """One committed step of a run. A step that a rollback undid comes again."""

    step: int
    """its number, from 0"""
    steps: int
    """that the run is to have"""
    loss: float
    """nats per token, before the update; of several replicas, their mean"""
    tokens_per_s: float
    """since the step before, recoveries included"""
    grad_norm: Mapping[int, float]
    """stage → L2 norm of its gradient before clipping"""
    val_loss: float | None
    """the newest validation's loss, nats per token; None before the first"""


class Listener(Quiet):
    """A display that passes everything on to another one, and steps to a function too."""

    def __init__(self, display: Quiet, hear: Callable[[Step], object]) -> None:
        """``hear`` is not called any more after it has raised something."""
        self._display, self._hear = display, hear
        self._steps = 0
        self._validated: float | None = None
        self.error: Exception | None = None
        """what it raised; the run is to be stopped then"""

    def start(self, total: int, first: int) -> None:
        self._steps = total
        self._display.start(total, first)

    def on_event(self, t: float, event: Event) -> None:
        self._display.on_event(t, event)

    def on_decision(self, t: float, decision: Decision) -> None:
        self._display.on_decision(t, decision)

    def on_metric(self, metric: Metric) -> None:
        self._display.on_metric(metric)
        if isinstance(metric, ValidationMetric):
            self._validated = metric.val_loss
            return
        if self.error is not None:
            return
        step = Step(metric.step, self._steps, metric.loss, metric.tokens_per_s, metric.grad_norm, self._validated)
        try:
            self._hear(step)
        except Exception as error:  # a program's own affair: it gets it back once the run is saved
            self.error = error

    def stop(self) -> None:
        self._display.stop()
