"""Observer of a run that feeds the logs on disk, the progress display and trackers.

Each tracker runs in a separate thread (:class:`TrackerThread`). Training waits for them only at the end, for at most
``FINISH_TIMEOUT_S``. ``ReportSampling`` selects the steps whose spans are logged: those that the report draws, and a
decreasing share of the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from operator import methodcaller
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

from planaria.common.stdio import lost_output
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import Metric, StepMetric
from planaria.control.log.writer import RunLog, SharedHistory
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.tally import RunTally
from planaria.report.observe.tracker import Setting, Tracker
from planaria.report.run.metrics import StepMetrics
from planaria.report.run.recovery_timing import RecoveryTiming

STEPS_PER_SAMPLE = 20
"""interval at which the first steps are logged with their spans"""
THINNED_FROM = 1000
"""half the number of steps after which the interval doubles: it is 20 for the first 2,000 steps, 40 for the next 2,000,
80 for the next 4,000, …"""
AFTER_FORMING = 2
"""steps after a formation that are also logged with their spans, to time and draw recoveries"""
STEPS_PER_SUM = 100
"""steps whose bytes are logged as one sum per worker; a killed controller loses at most these"""


def span_interval(step: int) -> int:
    """Return the interval at which steps around ``step`` are logged with their spans."""
    return STEPS_PER_SAMPLE << max(0, (step // THINNED_FROM).bit_length() - 1)


class ReportSampling:
    """Thins work reports: drops the spans of most steps, but keeps all byte counts and memory peaks."""

    def __init__(self) -> None:
        self._formed: dict[int, int] = {}
        """replica → its step at its last formation"""
        self._sums: dict[int, tuple[float, e.WorkReport]] = {}
        """node → time and sum of reports that are not logged yet"""

    def restart(self, replica: int, step: int) -> None:
        """Record that a replica was formed and continues from ``step``."""
        self._formed[replica] = step

    def select(self, t: float, worked: e.WorkReport, replica: int) -> list[tuple[float, e.WorkReport]]:
        """Return the reports to log now, with their times: those of selected steps with spans, sums of the rest."""
        since = worked.step - self._formed.get(replica, 0)
        if worked.dropped or since <= AFTER_FORMING or worked.step % span_interval(worked.step) == 0:
            before = self._sums.pop(worked.node, None)
            return [*([before] if before else []), (t, worked)]
        before = self._sums.get(worked.node)
        bare = worked.model_copy(update={"spans": []})
        if before is None or not _may_sum(before[1], worked):
            self._sums[worked.node] = t, bare
            return [before] if before else []
        self._sums[worked.node] = t, bare.model_copy(update=_sum(before[1], worked))
        return []

    def flush(self) -> list[tuple[float, e.WorkReport]]:
        """Return and remove the reports that are not logged yet."""
        left = list(self._sums.values())
        self._sums.clear()
        return left


def _sum(worked: e.WorkReport, later: e.WorkReport) -> dict[str, object]:
    """Add up the bytes sent to each peer, and keep the larger memory peaks."""
    sent = {
        peer: worked.sent_bytes.get(peer, 0) + later.sent_bytes.get(peer, 0)
        for peer in worked.sent_bytes | later.sent_bytes
    }
    peaks = {name: max(getattr(worked, name), getattr(later, name)) for name in ("peak_bytes", "device_peak_bytes")}
    return {"sent_bytes": sent, **peaks}


def _may_sum(worked: e.WorkReport, later: e.WorkReport) -> bool:
    """Return whether both reports have the same worker, generation and hundred of steps."""
    same_worker = (worked.worker, worked.generation) == (later.worker, later.generation)
    return same_worker and worked.step // STEPS_PER_SUM == later.step // STEPS_PER_SUM


SWITCH_INTERVAL_S = 0.0005
"""interpreter switch interval while trackers run; Python's default of 5 ms would slow down small steps"""
MAX_CALLS = 1000
"""maximum queued calls of a slow tracker; further ones are dropped"""
CALL_TIMEOUT_S = 120.0
"""timeout of a call; the first may import a library and wait for a remote server"""
FINISH_TIMEOUT_S = 60.0
"""time for all trackers together to finish at the end of a run"""
Call = Callable[[Tracker], None]


class RunIdentity(NamedTuple):
    """Identity and settings of a run, for trackers."""

    identity: str
    settings: Mapping[str, Setting]


class ObserverState:
    """Numbers of the display, tallies, metrics and names of a run.

    A standby maintains this state while it waits.
    """

    def __init__(self, tokens_per_step: int, progress: NoProgress) -> None:
        self.progress = progress
        self.tally, self.metrics = RunTally(), StepMetrics(tokens_per_step)
        self.sampling = ReportSampling()

    def recall(self, t: float, fact: e.Event | d.Decision) -> Metric | None:
        """Apply an event or decision of another controller; return the metrics that it completes."""
        self.progress.recall(t, fact)
        self.tally.apply(t, fact)
        if isinstance(fact, d.Form):
            self.sampling.restart(fact.replica, fact.step)
        return self.metrics.apply(t, fact)


class RunObserver:
    """Observer of a run: passes what happens to the run's log, a display and trackers.

    The run continues without a display or tracker that fails, but should stop if the log has ``trouble``.
    """

    def __init__(
        self,
        folder: Path,
        tokens_per_step: int,
        progress: NoProgress,
        trackers: Mapping[str, Tracker] | None = None,
        identity: RunIdentity | None = None,
        shared: SharedHistory | None = None,
        clock_offset_s: float = 0.0,
        state: ObserverState | None = None,
    ) -> None:
        """:param shared: the run's log on other machines
        :param clock_offset_s: added to times, so that those of a log that another machine began continue
        :param state: state folded from the log's earlier events; its display replaces ``progress``
        """
        self._offset = clock_offset_s
        self._log, self._shared = RunLog(folder, shared), shared
        state = state or ObserverState(tokens_per_step, progress)
        self._progress, self._tally, self._metrics = state.progress, state.tally, state.metrics
        self._sampling = state.sampling
        self._folder = folder
        self._trackers = [TrackerThread(name, tracker) for name, tracker in (trackers or {}).items()]
        self._identity, self._started = identity, False
        self._usual_s = sys.getswitchinterval()

    @property
    def trouble(self) -> str:
        """Why the log could not be written; empty if it was."""
        return self._log.trouble

    def resume(self) -> None:
        """Continue the run whose past the given state holds."""
        self._progress.show()
        self._open_trackers()

    def on_event(self, t: float, event: e.Event, notice: int = 0) -> None:
        t += self._offset
        self._log.event(t, event, notice)
        if isinstance(event, e.RunStarted):
            self._progress.start(event.steps, event.first_step)
            if not self._started:
                self._open_trackers()
        self._apply(t, event)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        t += self._offset
        self._log.decision(t, decision)
        if isinstance(decision, d.Form):
            self._sampling.restart(decision.replica, decision.step)
        self._apply(t, decision)

    def _apply(self, t: float, fact: e.Event | d.Decision) -> None:
        self._progress.on_fact(t, fact)
        self._track_recoveries(self._tally.apply(t, fact))
        self._record_metric(self._metrics.apply(t, fact))
        self._check_display(t)

    def on_worked(self, t: float, worked: e.WorkReport) -> None:
        t += self._offset
        for when, report in self._sampling.select(t, worked, self._tally.members.replica(worked.node)):
            self._log.worked(when, report)
        self._track_recoveries(self._tally.apply_work_report(worked))

    def secure(self) -> None:
        if self._shared is not None:
            self._shared.secure()

    def check(self) -> None:
        if self._shared is not None:
            self._shared.check()

    def when_lost(self, disconnect: Callable[[], object]) -> None:
        if self._shared is not None:
            self._shared.when_lost(disconnect)

    @property
    def lost(self) -> bool:
        """Whether workers were lost, including those that had not started."""
        return bool(self._tally.lost)

    def close(self) -> None:
        until = time.monotonic() + FINISH_TIMEOUT_S
        for tracker in self._trackers:
            tracker.finish(until)
        if self._trackers and self._started:
            sys.setswitchinterval(self._usual_s)
        self._report_trouble(time.monotonic())  # before the log closes
        self._progress.stop()
        for when, report in self._sampling.flush():
            self._log.worked(when, report)
        self._log.close()

    def _check_display(self, t: float) -> None:
        """Continue without a display once its stream is closed, and log that once."""
        if type(self._progress) is not NoProgress and (why := lost_output()):
            self._progress.stop()
            self._progress = NoProgress()
            self.on_event(t, e.Trouble(detail=f"continuing without a display ({why})"))

    def _record_metric(self, metric: Metric | None) -> None:
        if metric is None:
            return
        self._log.metric(metric)
        self._progress.on_metric(metric)
        self._tally.apply_metric(metric)
        scalars = {name: value for name, value in metric if isinstance(value, float) and name != "t"}
        if isinstance(metric, StepMetric):
            scalars |= self._tally.counts
        self._track(lambda tracker: tracker.scalars(metric.step, scalars))
        self._report_trouble(metric.t)

    def _track_recoveries(self, over: Iterable[RecoveryTiming]) -> None:
        for timing in over:
            if timing.total is not None:
                parts = {f"recovery_s/{name}": took for name, took in timing.parts.items() if took is not None}
                scalars, step = {"recovery_s": timing.total, **parts}, self._tally.steps
                self._track(methodcaller("scalars", step, scalars))

    def _open_trackers(self) -> None:
        self._started = True
        if self._trackers:
            sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._usual_s))
        if (identity := self._identity) is not None:
            self._track(lambda tracker: tracker.identify(*identity))
        self._track(lambda tracker: tracker.open(self._folder))

    def _track(self, call: Call) -> None:
        for tracker in self._trackers:
            tracker.send(call)

    def _report_trouble(self, t: float) -> None:
        for tracker in self._trackers:
            if trouble := tracker.trouble():
                self.on_event(t, e.Trouble(detail=trouble))


class TrackerThread:
    """Calls a tracker from a separate thread, in order, until it fails or hangs.

    A hanging thread ends with the process.
    """

    def __init__(self, name: str, tracker: Tracker, max_calls: int = MAX_CALLS, call_s: float = CALL_TIMEOUT_S) -> None:
        self._name = name
        self._tracker = tracker
        self._max_calls = max_calls
        self._call_s = call_s
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = Thread(target=self._run_calls, name=f"tracker {name}", daemon=True)
        self._since: float | None = None
        """start of the current call"""
        self._failure = ""
        self._slow = self._reported_slow = self._abandoned = False

    def send(self, call: Call) -> None:
        """Queue a call."""
        if self._abandoned:
            return
        if self._queue.qsize() >= self._max_calls:
            self._slow = True
            return
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put(call)

    def trouble(self) -> str:
        """Return a new problem of the tracker, each once; empty if there is none."""
        if self._abandoned:
            return ""
        since = self._since
        if not self._failure and since is not None and time.monotonic() - since > self._call_s:
            self._failure = f"it has not answered for {self._call_s:g} s"
        if self._failure:
            self._abandoned = True
            return f"continuing without {self._name} ({self._failure})"
        if self._slow and not self._reported_slow:
            self._reported_slow = True
            return f"{self._name} is slow: more than {self._max_calls} calls are queued, and further ones are dropped"
        return ""

    def finish(self, until: float) -> None:
        """Close the tracker and wait for it until a monotonic time; :meth:`trouble` returns a failure."""
        if self._thread.ident is None or self._abandoned:
            return
        self._queue.put(lambda tracker: tracker.close())
        self._queue.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and not self._failure:
            self._failure = "it did not finish in time"

    def _run_calls(self) -> None:
        while (call := self._queue.get()) is not None and not self._abandoned:
            self._since = time.monotonic()
            try:
                call(self._tracker)
            except (Exception, SystemExit) as error:  # the run continues after a tracker's error
                why = getattr(error, "strerror", None) or error
                self._failure = f"{type(error).__name__}: {why}"
                return
            self._since = None
