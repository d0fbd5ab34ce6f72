from __future__ import annotations

import errno
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import PrivateAttr
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from planaria.config.schema import ObserveConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.decisions import Decision
from planaria.control.facts.events import Event
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import Metric, StepMetric, ValidationMetric
from planaria.control.log.segments import RotatingLog
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.run_observer import SWITCH_INTERVAL_S, RunObserver
from planaria.report.observe.tracker import Tracker
from planaria.report.observe.trackers import trackers
from support.report import synthetic_replicas as r


@pytest.fixture(autouse=True)
def _configured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(RunConfig().model_dump_json())


class Shown(NoProgress):
    """A progress display that records its calls."""

    def __init__(self) -> None:
        self.started: tuple[int, int] | None = None
        self.metrics: list[Metric] = []
        self.facts: list[Event | Decision] = []
        self.stopped = False

    def start(self, total: int, first: int) -> None:
        self.started = (total, first)

    def on_fact(self, t: float, fact: Event | Decision) -> None:
        self.facts.append(fact)

    def on_metric(self, metric: Metric) -> None:
        self.metrics.append(metric)

    def stop(self) -> None:
        self.stopped = True


def test_every_fact_is_logged_and_shown(tmp_path: Path) -> None:
    shown = Shown()
    watch = RunObserver(tmp_path, 100, shown, trackers(ObserveConfig()))
    reported: list[tuple[float, Event | Decision]] = [
        (1.0, e.RunStarted(name="run", seed=1, stages=1, steps=9, first_step=3, samples_per_step=8, wall_time=0.0)),
        (2.0, d.RunStep(generation=1, step=3)),
        (3.0, e.StageReady(worker="w0", stage=0, generation=1, step=3, loss=4.5, grad_norm=1.5)),
        (4.0, d.Commit(generation=1, step=3, progress=3)),
        (5.0, d.RunStep(generation=1, step=4, mode="evaluate")),
        (6.0, e.StageReady(worker="w0", stage=0, generation=1, step=4, mode="evaluate", loss=4.25)),
        (7.0, d.Finish(outcome="finished")),
    ]
    for t, fact in reported:
        if isinstance(fact, d.RunStep | d.Commit | d.Finish):
            watch.on_decision(t, fact)
        else:
            watch.on_event(t, fact)  # type: ignore[arg-type]
    worked = e.WorkReport(worker="w0", node=0, stage=0, generation=1, step=3, spans=[], sent_bytes={1: 9})
    watch.on_worked(4.5, worked)
    watch.close()

    record = read_run(tmp_path)
    assert record.history == reported
    assert record.worked == [(4.5, worked)]
    assert record.metrics == [
        StepMetric(t=4.0, step=3, loss=4.5, tokens_per_s=50.0, grad_norm={0: 1.5}),
        ValidationMetric(t=6.0, step=4, val_loss=4.25),
    ]

    assert shown.started == (9, 3)
    assert shown.facts == [fact for _, fact in reported]
    assert shown.metrics == record.metrics
    assert shown.stopped
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curves = {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}
    counts = {"steps": 4.0, "generation": 0.0, "rounds": 0.0, "sent_bytes": 0.0, "recoveries": 0.0, "workers_lost": 0.0}
    counted = {name: [(3, count)] for name, count in counts.items()}
    assert curves == {"loss": [(3, 4.5)], "tokens_per_s": [(3, 50.0)], "val_loss": [(4, 4.25)], **counted}


class Failing(Tracker):
    """Fails at one of its methods and records the calls."""

    at: str
    _error: type[BaseException] = PrivateAttr(RuntimeError)
    _calls: list[str] = PrivateAttr(default_factory=list)

    def _call(self, method: str) -> None:
        self._calls.append(method)
        if method == self.at:
            raise self._error(f"no {method}")

    def open(self, folder: Path) -> None:
        self._call("open")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._call("scalars")

    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize(
    ("at", "calls"),
    [("open", ["open"]), ("scalars", ["open", "scalars"]), ("close", ["open", "scalars", "scalars", "close"])],
)
def test_a_failing_tracker_is_dropped_and_the_others_continue(at: str, calls: list[str], tmp_path: Path) -> None:
    failing, sound = Failing(at=at), Failing(at="never")
    watch = RunObserver(tmp_path, 300, NoProgress(), {"failing": failing, "sound": sound})
    watch.on_event(0.0, r.started(1))
    for step in range(2):
        watch.on_decision(1.0, r.run_step(0, step, step))
        watch.on_event(2.0, r.ready(0, step, 2.0))
        watch.on_decision(3.0, r.commit(0, step, step))
    watch.close()
    assert failing._calls == calls and sound._calls == ["open", "scalars", "scalars", "close"]
    reported = [fact.detail for _, fact in read_run(tmp_path).history if isinstance(fact, e.Trouble)]
    assert reported == [f"continuing without failing (RuntimeError: no {at})"]


def test_a_tracker_that_calls_exit_does_not_end_the_run(tmp_path: Path) -> None:
    failing = Failing(at="open")
    failing._error = SystemExit
    watch = RunObserver(tmp_path, 300, NoProgress(), {"failing": failing})
    watch.on_event(0.0, r.started(1))
    watch.close()
    reported = [fact.detail for _, fact in read_run(tmp_path).history if isinstance(fact, e.Trouble)]
    assert reported == ["continuing without failing (SystemExit: no open)"]


@pytest.mark.parametrize("tracked", [True, False])
def test_trackers_shorten_the_interpreters_switch_interval(tracked: bool, tmp_path: Path) -> None:
    usual = sys.getswitchinterval()
    watch = RunObserver(tmp_path, 300, NoProgress(), {"sound": Failing(at="never")} if tracked else {})
    watch.on_event(0.0, r.started(1))
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S if tracked else usual)
    watch.close()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_a_run_that_never_began_opens_no_tracker(tmp_path: Path) -> None:
    tracker = Failing(at="never")
    RunObserver(tmp_path, 300, NoProgress(), {"tracker": tracker}).close()
    assert tracker._calls == []


def test_spans_after_a_replicas_own_formations_are_kept(tmp_path: Path) -> None:
    watch = RunObserver(tmp_path, 300, Shown())
    watch.on_event(1.0, r.started(3, steps=100))
    for replica, step in ((0, 50), (1, 0), (2, 0), (0, 52)):
        watch.on_decision(2.0, r.form(replica, "ab", step=step))
    span = e.Span(action="backward", microbatch=0, hop=0, start=1.0, end=2.0)
    for node, step in ((0, 53), (2, 53), (2, 2)):
        work = e.WorkReport(worker="x", node=node, stage=0, generation=1, step=step, spans=[span], sent_bytes={})
        watch.on_worked(3.0, work)
    watch.close()
    kept = {(work.node, work.step): bool(work.spans) for _, work in read_run(tmp_path).worked}
    assert kept == {(0, 53): True, (2, 53): False, (2, 2): True}


def test_metrics_of_replicas_are_logged_with_those_of_each(tmp_path: Path) -> None:
    watch = RunObserver(tmp_path, 300, Shown())
    watch.on_event(0.0, r.started(3))
    for replica in range(3):
        watch.on_decision(1.0, r.run_step(replica, 0, replica))
        watch.on_event(2.0, r.ready(replica, 0, 2.0 + replica))
        watch.on_decision(3.0, r.commit(replica, 0, replica))
    for replica in range(3):
        watch.on_decision(4.0, d.RunStep(replica=replica, generation=1, step=1, mode="evaluate"))
        watch.on_event(5.0, r.ready(replica, 1, 4.0 + replica, mode="evaluate"))
    watch.close()
    trained, validated = read_run(tmp_path).metrics
    assert isinstance(trained, StepMetric) and isinstance(validated, ValidationMetric)
    assert (trained.loss, trained.losses, trained.tokens_per_s) == (3.0, {0: 2.0, 1: 3.0, 2: 4.0}, 150.0)
    assert (validated.val_loss, validated.val_losses) == (5.0, {0: 4.0, 1: 5.0, 2: 6.0})


@pytest.mark.parametrize(("failures", "complete"), [(1, True), (5, True), (10**6, False)])
def test_the_log_of_a_full_disk_continues_once_a_failed_save_is_removed(
    failures: int, complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that save may take the freed reserve before the log does, until their saves fail."""
    tried, write = 0, RotatingLog.write

    def on_full_disk(log: RotatingLog, line: str) -> None:
        nonlocal tried
        tried += 1
        if 2 < tried <= 2 + failures:
            raise OSError(errno.ENOSPC, "No space left on device", "events.jsonl")
        write(log, line)

    monkeypatch.setattr(RotatingLog, "write", on_full_disk)
    monkeypatch.setattr("planaria.control.log.writer.DISK_RETRY_S", 0.4)
    watch = RunObserver(tmp_path, 100, NoProgress())
    start = e.RunStarted(name="run", seed=1, stages=1, steps=9, first_step=3, samples_per_step=8, wall_time=0.0)
    for number, event in enumerate([start, *(e.Trouble(detail=f"notice {n}") for n in range(3))]):
        watch.on_event(float(number), event)
    watch.close()
    assert "events.jsonl cannot be written (No space left on device)" in watch.trouble
    assert not (tmp_path / ".reserve").exists()
    details = [event.detail for _, event in read_run(tmp_path).history if isinstance(event, e.Trouble)]
    assert details == ["notice 0", "notice 1", "notice 2"][: 3 if complete else 1]
