"""Everything that watches a run, behind one observer: the logs on disk, the progress display, trackers."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from planaria.common.outlet import lost
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunLog
from planaria.control.run_record import Metric, StepMetric
from planaria.control.segments import Reserve
from planaria.report.live.beside import END_S, Beside
from planaria.report.live.progress import Quiet
from planaria.report.live.settings import Setting
from planaria.report.live.tally import Tally
from planaria.report.live.tracker import Tracker
from planaria.report.run.metrics import StepMetrics
from planaria.report.run.naming import Naming
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.run.sample import Sample

SWITCH_S = 0.0005
"""After so long a tracker's thread that computes leaves the interpreter to the run's thread, if that waits for it.
Python's own 5 ms would be some percent of a small run's step."""


class About(NamedTuple):
    """What trackers are told of a run before it begins."""

    identity: str
    settings: Mapping[str, Setting]


class Watch:
    """Writes down and shows what the engine tells.

    The display and trackers may fail: then the run goes on without. The log may not, for it is what proves which
    samples were used. When a line of it cannot be written, ``trouble`` says why, and asks the run to stop; room was
    kept for what remains to be noted until then. Should that not do either, the log ends there, without a gap.
    """

    def __init__(
        self,
        folder: Path,
        tokens_per_step: int,
        progress: Quiet,
        trackers: Mapping[str, Tracker] | None = None,
        about: About | None = None,
    ) -> None:
        self._log, self._progress, self._folder = RunLog(folder), progress, folder
        self._trackers = [Beside(name, tracker) for name, tracker in (trackers or {}).items()]
        self._about, self._began = about, False
        self._usual_s = sys.getswitchinterval()
        self._tally = Tally()
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
        if isinstance(event, e.RunStarted) and not self._began:
            self._begin()
        self._recovered(self._tally.take(t, event))
        self._measured(self._metrics.on_event(t, event))
        self._look_at_the_display(t)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        self._note(partial(self._log.decision, t, decision))
        if isinstance(decision, d.Form):
            self._sample.form(decision.replica, decision.step)
        self._progress.on_decision(t, decision)
        self._recovered(self._tally.take(t, decision))
        self._measured(self._metrics.on_decision(t, decision))
        self._look_at_the_display(t)

    def on_worked(self, t: float, worked: e.Worked) -> None:
        for when, kept in self._sample.take(t, worked, self._naming.replica(worked.node)):
            self._note(partial(self._log.worked, when, kept))
        self._recovered(self._tally.worked(worked))

    @property
    def lost(self) -> bool:
        """Whether workers have been lost, also such as had not started."""
        return bool(self._tally.lost)

    def close(self) -> None:
        until = time.monotonic() + END_S
        for tracker in self._trackers:
            tracker.finish(until)
        if self._trackers and self._began:
            sys.setswitchinterval(self._usual_s)
        self._hear(time.monotonic())  # while there is a log to say it in
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
            removed = error.errno == errno.ENOENT
            fix = "start the run again, and leave its folder in place" if removed else "free the disk, then resume it"
            why = f"{error.filename}: cannot be written ({error.strerror}); {fix}"
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
        self._tally.measured(metric)
        values = {name: value for name, value in metric if isinstance(value, float) and name != "t"}
        if isinstance(metric, StepMetric):
            values |= self._tally.counts
        self._track(lambda tracker: tracker.scalars(metric.step, values))
        self._hear(metric.t)

    def _recovered(self, over: Iterable[RecoveryTiming]) -> None:
        for timing in over:
            if timing.total is not None:
                parts = {f"recovery_s/{name}": took for name, took in timing.parts.items() if took is not None}
                values, step = {"recovery_s": timing.total, **parts}, self._tally.steps
                self._track(partial(_scalars, step=step, values=values))

    def _begin(self) -> None:
        """Trackers begin when the run has."""
        self._began = True
        if self._trackers:
            sys.setswitchinterval(min(SWITCH_S, self._usual_s))
        if (about := self._about) is not None:
            self._track(lambda tracker: tracker.introduced(*about))
        self._track(lambda tracker: tracker.open(self._folder))

    def _track(self, told: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            tracker.tell(told)

    def _hear(self, t: float) -> None:
        """When something is wrong with a tracker, say so."""
        for tracker in self._trackers:
            if trouble := tracker.trouble():
                self.on_event(t, e.Trouble(detail=trouble))


def _scalars(tracker: Tracker, step: int, values: Mapping[str, float]) -> None:
    tracker.scalars(step, values)
