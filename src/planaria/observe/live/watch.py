"""Everything that watches a run, behind one observer: the logs on disk, the progress display, TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from planaria.observe.live.progress import Quiet
from planaria.observe.live.tracker import Tracker
from planaria.observe.run.metrics import StepMetrics
from planaria.observe.run.naming import Naming
from planaria.outlet import lost
from planaria.record import decisions as d
from planaria.record import events as e
from planaria.record.logs import RunLog
from planaria.record.reserve import Reserve
from planaria.record.run_record import Metric
from planaria.record.sample import Sample


class Watch:
    """Writes down and shows what the engine tells.

    The display and TensorBoard may fail: then the run goes on without. The log may not, for it is what proves which
    samples were used. When a line of it cannot be written, ``trouble`` says why, and asks the run to stop; room was
    kept for what remains to be noted until then. Should that not do either, the log ends there, without a gap.
    """

    def __init__(self, folder: Path, tokens_per_step: int, progress: Quiet) -> None:
        self._log, self._progress = RunLog(folder), progress
        self._tracker: Tracker | None = Tracker(folder / "tensorboard")
        self._reserve = Reserve(folder)
        self.trouble = ""
        self._full = False
        """is the log at its end?"""
        self._metrics = StepMetrics(tokens_per_step)
        self._naming, self._sample = Naming(), Sample()

    def on_event(self, t: float, event: e.Event) -> None:
        self._note(partial(self._log.event, t, event))
        if isinstance(event, e.RunStarted):
            self._naming = Naming(event)
            self._progress.start(event.steps, event.first_step)
        self._progress.on_event(t, event)
        self._measured(self._metrics.on_event(t, event))
        self._look_at_the_display(t)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        self._note(partial(self._log.decision, t, decision))
        if isinstance(decision, d.Form):
            self._sample.form(decision.replica, decision.step)
        self._progress.on_decision(t, decision)
        self._measured(self._metrics.on_decision(t, decision))
        self._look_at_the_display(t)

    def on_worked(self, t: float, worked: e.Worked) -> None:
        for when, kept in self._sample.take(t, worked, self._naming.replica(worked.node)):
            self._note(partial(self._log.worked, when, kept))

    def close(self) -> None:
        self._progress.stop()
        with suppress(OSError):
            if self._tracker is not None:
                self._tracker.close()
        for when, kept in self._sample.rest():
            self._note(partial(self._log.worked, when, kept))
        self._log.close()
        self._reserve.release()

    def _note(self, write: Callable[[], None]) -> None:
        if self._full:
            return
        try:
            write()
        except OSError as error:
            why = f"{error.filename}: cannot be written ({error.strerror}); free the disk, then resume the run"
            self.trouble = self.trouble or why
            self._reserve.release()
            try:
                write()
            except OSError:
                self._full = True

    def _look_at_the_display(self, t: float) -> None:
        """When nobody can see it any more, go on without, and say so once."""
        if type(self._progress) is not Quiet and (why := lost()):
            self._progress.stop()
            self._progress = Quiet()
            self.on_event(t, e.Trouble(detail=f"going on without a display ({why})"))

    def _measured(self, metric: Metric | None) -> None:
        if metric is None:
            return
        self._note(partial(self._log.metric, metric))
        self._progress.on_metric(metric)
        try:
            if self._tracker is not None:
                scalars = {name: value for name, value in metric if isinstance(value, float) and name != "t"}
                self._tracker.scalars(metric.step, scalars)
        except OSError as error:
            self._tracker = None
            self.on_event(metric.t, e.Trouble(detail=f"going on without TensorBoard ({error.strerror or error})"))
