from __future__ import annotations

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import StepMetric, ValidationMetric
from planaria.report.run.metrics import StepMetrics
from support.report import synthetic_replicas as r


def ready(
    stage: int, step: int, loss: float | None = None, norm: float | None = 1.0, mode: e.Mode = "train"
) -> e.StageReady:
    return e.StageReady(worker=f"w{stage}", stage=stage, generation=1, step=step, loss=loss, grad_norm=norm, mode=mode)


def step(metrics: StepMetrics, t: float, number: int, loss: float) -> StepMetric:
    """One untroubled second of training; the record of its commit."""
    assert metrics.apply(t, d.RunStep(generation=1, step=number)) is None
    assert metrics.apply(t + 0.8, ready(1, number, norm=3.0)) is None
    assert metrics.apply(t + 0.9, ready(0, number, loss=loss, norm=2.0)) is None
    record = metrics.apply(t + 1.0, d.Commit(generation=1, step=number, progress=number))
    assert isinstance(record, StepMetric)
    return record


def test_a_committed_step_gives_its_record() -> None:
    metrics = StepMetrics(tokens_per_step=500)
    assert step(metrics, 10.0, 0, 5.5) == StepMetric(
        t=11.0, step=0, loss=5.5, grad_norm={0: 2.0, 1: 3.0}, tokens_per_s=500.0
    )


def test_throughput_counts_the_pauses_between_steps() -> None:
    metrics = StepMetrics(tokens_per_step=500)
    step(metrics, 0.0, 0, 5.5)
    record = step(metrics, 4.0, 1, 5.4)  # three seconds of recovery in between
    assert record.tokens_per_s == pytest.approx(125.0)


def test_reports_of_a_step_that_was_dropped_do_not_count() -> None:
    metrics = StepMetrics(tokens_per_step=500)
    metrics.apply(0.0, d.RunStep(generation=1, step=3))
    metrics.apply(0.5, ready(2, 3, norm=99.0))
    metrics.apply(0.6, ready(0, 3, loss=9.9, norm=99.0))
    record = step(metrics, 1.0, 3, 5.5)
    assert (record.loss, record.grad_norm) == (5.5, {0: 2.0, 1: 3.0})


def test_a_validation_is_recognised_by_its_mode() -> None:
    metrics = StepMetrics(tokens_per_step=500)
    metrics.apply(0.0, d.RunStep(generation=1, step=4, mode="evaluate"))
    assert metrics.apply(0.6, ready(0, 4, loss=3.25, norm=1.0, mode="evaluate")) is not None
    metrics.apply(0.0, d.RunStep(generation=1, step=4))
    assert metrics.apply(0.6, ready(0, 4, loss=3.25, norm=None)) is None


def whole(metrics: StepMetrics, t: float, replica: int, own: int, block: int, loss: float) -> StepMetric | None:
    """A replica's step of a second, with one block of samples; the record of the run's step, if it has all of its."""
    assert metrics.apply(t, r.run_step(replica, own, block)) is None
    assert metrics.apply(t + 0.5, r.ready(replica, own, loss, norm=loss + 1)) is None
    assert metrics.apply(t + 0.6, r.ready(replica, own, None, norm=loss + 2, stage=1)) is None
    record = metrics.apply(t + 1.0, r.commit(replica, own, block))
    assert record is None or isinstance(record, StepMetric)
    return record


def of_three(**given: object) -> StepMetrics:
    metrics = StepMetrics(tokens_per_step=300)
    metrics.apply(0.0, r.started(3, steps=4, **given))
    return metrics


def test_replicas_have_a_record_together_when_the_last_of_a_steps_blocks_is_in() -> None:
    metrics = of_three()
    assert whole(metrics, 0.0, 0, 0, 0, 2.0) is None
    assert whole(metrics, 1.0, 0, 1, 3, 8.0) is None, "replica 0 is ahead"
    assert whole(metrics, 2.0, 2, 0, 2, 4.0) is None
    assert whole(metrics, 3.0, 1, 0, 1, 6.0) == StepMetric(
        t=4.0, step=0, loss=4.0, grad_norm={0: 5.0, 1: 6.0}, losses={0: 2.0, 1: 6.0, 2: 4.0}, tokens_per_s=100.0
    )


def test_reports_of_replicas_that_run_at_the_same_time_are_not_mixed_up() -> None:
    metrics = of_three()
    for replica in (0, 1, 2):
        metrics.apply(0.0, r.run_step(replica, 0, replica))
        metrics.apply(0.5, r.ready(replica, 0, float(replica)))
    metrics.apply(0.6, r.run_step(0, 0, 0))  # it begins the step anew
    metrics.apply(0.7, r.ready(0, 0, 30.0))
    records = [metrics.apply(1.0, r.commit(replica, 0, replica)) for replica in (2, 0, 1)]
    assert records[:2] == [None, None] and isinstance(records[2], StepMetric)
    assert records[2].losses == {0: 30.0, 1: 1.0, 2: 2.0}


def test_a_replica_that_replaces_a_disbanded_one_completes_the_step() -> None:
    metrics = of_three()
    whole(metrics, 0.0, 0, 0, 0, 2.0)
    whole(metrics, 0.0, 1, 0, 1, 3.0)
    metrics.apply(1.5, d.Disband(replica=2, workers=[], reason=""))
    record = whole(metrics, 2.0, 0, 1, 2, 4.0)
    assert record is not None
    assert (record.step, record.loss, record.losses) == (0, 3.0, {0: 3.0, 1: 3.0})


def test_steps_undone_by_a_rollback_are_awaited_again() -> None:
    metrics = of_three()
    for replica in range(3):
        whole(metrics, 0.0, replica, 0, replica, 2.0)
    metrics.apply(2.0, r.form(1, "cd", outcome="rolled back", step=0))
    assert whole(metrics, 2.0, 0, 1, 3, 5.0) is None
    again = whole(metrics, 4.0, 1, 0, 1, 8.0)
    assert again is not None and (again.step, again.loss) == (0, 4.0)


def test_a_step_that_an_earlier_part_of_the_run_had_begun_is_complete_without_that() -> None:
    metrics = of_three(first_block=3, blocks_ahead=[4], first_step=1)
    assert whole(metrics, 0.0, 0, 1, 3, 2.0) is None
    record = whole(metrics, 1.0, 2, 1, 5, 4.0)
    assert record is not None and (record.step, record.loss) == (1, 3.0)


def evaluate(metrics: StepMetrics, replica: int, step: int, loss: float) -> ValidationMetric | None:
    metrics.apply(9.0, d.RunStep(replica=replica, generation=1, step=step, mode="evaluate"))
    return metrics.apply(9.5, r.ready(replica, step, loss, mode="evaluate"))


def test_a_validation_is_the_mean_over_replicas_at_the_same_own_step() -> None:
    metrics = of_three()
    assert evaluate(metrics, 0, 2, 3.0) is None
    assert evaluate(metrics, 0, 4, 99.0) is None, "ahead"
    assert evaluate(metrics, 2, 2, 5.0) is None
    expected = ValidationMetric(t=9.5, step=2, val_loss=4.0, val_losses={0: 3.0, 1: 4.0, 2: 5.0})
    assert evaluate(metrics, 1, 2, 4.0) == expected


def test_a_disbanded_replica_does_not_delay_validations() -> None:
    metrics = of_three()
    evaluate(metrics, 0, 2, 3.0)
    evaluate(metrics, 1, 2, 5.0)
    record = metrics.apply(10.0, d.Disband(replica=2, workers=[], reason=""))
    assert record == ValidationMetric(t=10.0, step=2, val_loss=4.0, val_losses={0: 3.0, 1: 5.0})


def test_a_replica_founded_later_neither_repeats_nor_delays_validations() -> None:
    metrics = of_three()
    for replica in range(3):
        evaluate(metrics, replica, 0, 6.0)
    metrics.apply(5.0, d.ReplicaRestarted(replica=3))
    assert evaluate(metrics, 3, 0, 4.0) is None
    assert [evaluate(metrics, replica, 2, 3.0) for replica in range(2)] == [None, None]
    expected = ValidationMetric(t=9.5, step=2, val_loss=3.0, val_losses={0: 3.0, 1: 3.0, 2: 3.0})
    assert evaluate(metrics, 2, 2, 3.0) == expected


def test_the_last_validations_count_for_the_last_step() -> None:
    metrics = of_three()
    for block in range(12):
        whole(metrics, float(block), block % 3 if block else 1, block // 3 if block else 9, block, 2.0)
    assert evaluate(metrics, 0, 3, 3.0) is None
    assert evaluate(metrics, 1, 5, 4.0) is None
    record = evaluate(metrics, 2, 4, 5.0)
    assert record is not None and (record.step, record.val_loss) == (4, 4.0)
    assert metrics.apply(20.0, d.Finish(outcome="finished")) is None, "it was reported already"


def test_a_replica_validated_after_its_last_step_is_not_validated_again() -> None:
    metrics = of_three()
    evaluate(metrics, 0, 2, 3.0)  # and it makes no further step
    for block in range(12):
        whole(metrics, float(block), 1, block, block, 2.0)
    for replica, loss in ((1, 4.0), (2, 5.0)):
        assert evaluate(metrics, replica, 6, loss) is None
    record = metrics.apply(20.0, d.Finish(outcome="finished"))
    assert isinstance(record, ValidationMetric) and (record.step, record.val_loss) == (4, 4.0)
