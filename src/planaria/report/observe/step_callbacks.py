"""Callbacks for programs that start a run: one call per committed step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planaria.control.facts.decisions import Decision
from planaria.control.facts.events import Event, RunStarted
from planaria.control.log.run_record import Metric, ValidationMetric
from planaria.report.observe.progress import NoProgress


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
