"""What a run's metrics come to, in few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from planaria.record.run_record import RunRecord, StepMetric, ValidationMetric


@dataclass(frozen=True)
class Measured:
    """Of a whole run."""

    loss: float | None
    """of the last training step"""
    validation: ValidationMetric | None
    """the last one"""
    tokens_per_s: float | None
    """median over training steps"""
    steps: int
    """different ones that were trained"""


def measured(record: RunRecord) -> Measured:
    """Read off the run's metrics, once."""
    return record.once(_measured)


def _measured(record: RunRecord) -> Measured:
    loss, validation = None, None
    speeds: list[float] = []
    steps: set[int] = set()
    for metric in record.metrics:
        if isinstance(metric, StepMetric):
            loss = metric.loss
            steps.add(metric.step)
            if metric.tokens_per_s:
                speeds.append(metric.tokens_per_s)
        else:
            validation = metric
    return Measured(loss, validation, median(speeds) if speeds else None, len(steps))
