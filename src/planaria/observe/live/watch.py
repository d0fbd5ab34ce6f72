"""Everything that watches a run, behind one observer: the logs on disk, the progress display, trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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

    The display and trackers may fail: then the run goes on without. The log may not, for it is what proves which
    samples were used. When a line of it cannot be written, ``trouble`` says why, and asks the run to stop; room was
    kept for what remains to be noted until then. Should that not do either, the log ends there, without a gap.
    """

    def __init__(
        self, folder: Path, tokens_per_step: int, progress: Quiet, trackers: Mapping[str, Tracker] | None = None
    ) -> None:
        self._log, self._progress, self._folder = RunLog(folder), progress, folder
        self._unopened, self._trackers = dict(trackers or {}), dict[str, Tracker]()
        """by name, before the run has started and from then on; without those that have failed"""
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
        if isinstance(event, e.RunStarted):
            self._trackers, self._unopened = self._unopened, {}
            self._track(t, lambda tracker: tracker.open(self._folder))
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
        self._track(time.monotonic(), lambda tracker: tracker.close())  # while there is a log to say so in
        self._progress.stop()
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
        scalars = {name: value for name, value in metric if isinstance(value, float) and name != "t"}
        self._track(metric.t, lambda tracker: tracker.scalars(metric.step, scalars))

    def _track(self, t: float, tell: Callable[[Tracker], None]) -> None:
        """When a tracker fails, go on without it, and say so once."""
        for name, tracker in list(self._trackers.items()):
            try:
                tell(tracker)
            except (Exception, SystemExit) as error:  # whatever somebody's tracker does: no run ends by it
                del self._trackers[name]
                why = getattr(error, "strerror", None) or error
                self.on_event(t, e.Trouble(detail=f"going on without {name} ({type(error).__name__}: {why})"))
