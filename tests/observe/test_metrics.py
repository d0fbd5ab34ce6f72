from __future__ import annotations

import pytest

from planaria import decisions as d
from planaria import events as e
from planaria.observe.metrics import StepMetrics


def ready(stage: int, step: int, loss: float | None = None, norm: float | None = 1.0) -> e.StageReady:
    return e.StageReady(worker=f"w{stage}", stage=stage, generation=1, step=step, loss=loss, grad_norm=norm)


def step(metrics: StepMetrics, t: float, number: int, loss: float) -> object:
    """One untroubled second of training; the record of its commit."""
    assert metrics.on_decision(t, d.RunStep(generation=1, step=number)) is None
    assert metrics.on_event(t + 0.8, ready(1, number, norm=3.0)) is None
    assert metrics.on_event(t + 0.9, ready(0, number, loss=loss, norm=2.0)) is None
    return metrics.on_decision(t + 1.0, d.Commit(generation=1, step=number, progress=number))


def test_a_committed_step_gives_its_record() -> None:
    metrics = StepMetrics(tokens_per_step=500)
    assert step(metrics, 10.0, 0, 5.5) == {
        "t": 11.0, "step": 0, "loss": 5.5, "grad_norm": {"0": 2.0, "1": 3.0}, "tokens_per_s": pytest.approx(500.0),
    }  # fmt: skip


def test_throughput_counts_the_pauses_between_steps() -> None:
    metrics = StepMetrics(tokens_per_step=500)
    step(metrics, 0.0, 0, 5.5)
    record = step(metrics, 4.0, 1, 5.4)  # three seconds of recovery in between
    assert isinstance(record, dict)
    assert record["tokens_per_s"] == pytest.approx(125.0)


def test_reports_of_a_step_that_was_dropped_do_not_count() -> None:
    metrics = StepMetrics(tokens_per_step=500)
    metrics.on_decision(0.0, d.RunStep(generation=1, step=3))
    metrics.on_event(0.5, ready(2, 3, norm=99.0))
    metrics.on_event(0.6, ready(0, 3, loss=9.9, norm=99.0))
    record = step(metrics, 1.0, 3, 5.5)
    assert isinstance(record, dict)
    assert (record["loss"], record["grad_norm"]) == (5.5, {"0": 2.0, "1": 3.0})


def test_a_validation_gives_one_record_and_no_step() -> None:
    metrics = StepMetrics(tokens_per_step=500)
    assert metrics.on_decision(0.0, d.RunStep(generation=1, step=4, mode="evaluate")) is None
    assert metrics.on_event(0.5, ready(1, 4, norm=None)) is None
    assert metrics.on_event(0.6, ready(0, 4, loss=3.25, norm=None)) == {"t": 0.6, "step": 4, "val_loss": 3.25}


def test_other_facts_give_nothing() -> None:
    metrics = StepMetrics(tokens_per_step=500)
    assert metrics.on_event(0.0, e.WorkerJoined(worker="w0", incarnation=1, pid=1)) is None
    assert metrics.on_decision(0.0, d.Save(generation=1, step=1)) is None
