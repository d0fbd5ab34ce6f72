"""Everything that watches a run, behind one observer: the logs on disk, the progress display, TensorBoard."""

from __future__ import annotations

from pathlib import Path

from planaria import decisions as d
from planaria import events as e
from planaria.observe.logs import RunLog
from planaria.observe.metrics import StepMetrics
from planaria.observe.places import Places
from planaria.observe.progress import Quiet
from planaria.observe.tracker import Tracker

EVERY, AFTER_FORMING = 20, 2
"""spans are kept of every 20th step, and of the steps up to 2 after a formation"""


class Watch:
    """Writes down and shows what the engine tells."""

    def __init__(self, folder: Path, tokens_per_step: int, progress: Quiet) -> None:
        self._log, self._tracker, self._progress = RunLog(folder), Tracker(folder / "tensorboard"), progress
        self._metrics = StepMetrics(tokens_per_step)
        self._places = Places()
        self._formed: dict[int, int] = {}
        """replica → its step when it was last formed"""

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
            self._formed[decision.replica] = decision.step
        self._progress.on_decision(t, decision)
        self._measured(self._metrics.on_decision(t, decision))

    def on_worked(self, t: float, worked: e.Worked) -> None:
        """Keep what the report draws; of all other steps, the bytes but not the spans: a long run has millions."""
        formed = self._formed.get(self._places.replica(worked.node), 0)
        drawn = worked.dropped or worked.step - formed <= AFTER_FORMING or worked.step % EVERY == 0
        self._log.worked(t, worked if drawn else worked.model_copy(update={"spans": []}))

    def close(self) -> None:
        self._progress.stop()
        self._tracker.close()
        self._log.close()

    def _measured(self, record: dict[str, object] | None) -> None:
        if record is None:
            return
        t, step = record["t"], record["step"]
        assert isinstance(t, float) and isinstance(step, int)
        self._log.metric(t, {k: v for k, v in record.items() if k != "t"})
        self._progress.on_metric(record)
        self._tracker.scalars(step, {k: v for k, v in record.items() if isinstance(v, float) and k != "t"})
