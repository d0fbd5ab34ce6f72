"""Summary of a run: key metrics, and lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from statistics import median

from planaria.control.facts.events import LeaderStarted
from planaria.control.log.run_record import RunRecord, StepMetric, ValidationMetric, cached
from planaria.exchange.compress import compression_report
from planaria.report.run.diagnosis import summary_lines as diagnosis_lines
from planaria.report.run.recoveries import recoveries
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.run.round_history import settled_rounds, totals, totals_lines
from planaria.report.run.stage_peaks import summary_lines as memory_lines


@dataclass(frozen=True)
class RunMetrics:
    """Key metrics of a whole run."""

    loss: float | None = None
    """training loss of the last step; None if members of a group did not report it"""
    validation: ValidationMetric | None = None
    """last validation"""
    tokens_per_s: float | None = None
    """median over training steps"""
    steps: int = 0
    """number of distinct trained steps"""


@cached
def key_metrics(record: RunRecord) -> RunMetrics:
    """Return the key metrics of a run."""
    loss, validation = None, None
    speeds: list[float] = []
    steps: set[int] = set()
    for metric in record.metrics:
        if isinstance(metric, StepMetric):
            loss = None if isnan(metric.loss) else metric.loss
            steps.add(metric.step)
            if metric.tokens_per_s:
                speeds.append(metric.tokens_per_s)
        else:
            validation = metric
    return RunMetrics(loss, validation, median(speeds) if speeds else None, len(steps))


def summary(record: RunRecord) -> Iterator[str]:
    """Yield lines on final losses, exchange, compression, memory, slowness and faults."""
    last = key_metrics(record)
    if last.loss is not None:
        validated = last.validation and f" (validation {last.validation.val_loss:.4f})"
        yield f"final loss    {last.loss:.4f}{validated or ''}"
    histories = settled_rounds(record)
    for index, line in enumerate(totals_lines(totals(histories)) if histories else ()):
        yield f"{'' if index else 'exchange':<14}{line}"
    if record.config.exchange.coded:
        from planaria.exchange.coded import coded_report  # imports torch

        yield from coded_report.summary_lines(record)
    yield from compression_report.summary_lines(record)
    yield from memory_lines(record)
    if lost := [fact.leaderless_s for _, fact in record.landmarks if isinstance(fact, LeaderStarted)]:
        yield f"controllers   {len(lost)} lost; replaced after {median(lost):.2f} s (median; maximum {max(lost):.2f} s)"
    slow = list(diagnosis_lines(record))
    yield from slow
    timings = recoveries(record)
    if not timings and not slow:
        yield "faults        none"
    for timing in timings:
        yield f"fault         {_describe_recovery(timing)}"
        if timing.total is not None:
            yield f"              {_phase_times(timing)}"


def _describe_recovery(timing: RecoveryTiming) -> str:
    text = f"step {timing.step}: {timing.where} lost, {timing.outcome}" if timing.nodes else f"step {timing.step}"
    if timing.total is None:
        return text
    return f"{text} {timing.total:.2f} s after the {'fault' if timing.fault_t else 'notice'}"


def _phase_times(timing: RecoveryTiming) -> str:
    phases = timing.parts.items()
    return ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in phases if seconds is not None)
