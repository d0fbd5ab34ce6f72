"""Everything that watches a run, behind one observer: the logs on disk, the progress display, TensorBoard."""

from __future__ import annotations

from pathlib import Path

from planaria import decisions as d
from planaria import events as e
from planaria.observe.logs import RunLog
from planaria.observe.metrics import StepMetrics
from planaria.observe.places import Places
from planaria.observe.progress import Quiet
from planaria.observe.sample import Sample
from planaria.observe.tracker import Tracker


class Watch:
    """Writes down and shows what the engine tells."""

    def __init__(self, folder: Path, tokens_per_step: int, progress: Quiet) -> None:
        self._log, self._tracker, self._progress = RunLog(folder), Tracker(folder / "tensorboard"), progress
        self._metrics = StepMetrics(tokens_per_step)
        self._places, self._sample = Places(), Sample()

    def on_event(self, t: float, event: e.Event) -> None:
        self._log.event(t, event)
        if isinstance(event, e.RunStarted):
            self._places = Places(event)
            self._progress.start(event.steps, event.first_step)
        self._progress.on_event(t, event)
        self._measured(self._metrics.on_event(t, event))

    def on_decision(self, t: float, decision: d.Decision) -> None:
        self._log.decision(t, decision)
        if isinstance(decision, d.Form):
            self._sample.form(decision.replica, decision.step)
        self._progress.on_decision(t, decision)
        self._measured(self._metrics.on_decision(t, decision))

    def on_worked(self, t: float, worked: e.Worked) -> None:
        for when, kept in self._sample.take(t, worked, self._places.replica(worked.node)):
            self._log.worked(when, kept)

    def close(self) -> None:
        self._progress.stop()
        self._tracker.close()
        for when, kept in self._sample.rest():
            self._log.worked(when, kept)
        self._log.close()

    def _measured(self, record: dict[str, object] | None) -> None:
        if record is None:
            return
        t, step = record["t"], record["step"]
        assert isinstance(t, float) and isinstance(step, int)
        self._log.metric(t, {k: v for k, v in record.items() if k != "t"})
        self._progress.on_metric(record)
        self._tracker.scalars(step, {k: v for k, v in record.items() if isinstance(v, float) and k != "t"})
