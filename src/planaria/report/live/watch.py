"""Everything that watches a run, behind one observer: the logs on disk, the progress display, trackers.

Each tracker runs in a thread of its own (:class:`Beside`): training waits for none, except for ``END_S`` at the end.
:class:`Sample` chooses the steps whose spans are logged: those that the report draws, and ever fewer of the others.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

from planaria.common.outlet import lost
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunLog
from planaria.control.run_record import Metric, StepMetric
from planaria.control.segments import Reserve
from planaria.report.live.progress import Quiet
from planaria.report.live.settings import Setting
from planaria.report.live.tally import Tally
from planaria.report.live.tracker import Tracker
from planaria.report.run.metrics import StepMetrics
from planaria.report.run.naming import Naming
from planaria.report.run.recovery_timing import RecoveryTiming

SWITCH_S = 0.0005
"""After so long a tracker's thread that computes leaves the interpreter to the run's thread, if that waits for it.
Python's own 5 ms would be some percent of a small run's step."""
MOST_CALLS = 1000
"""calls that may wait for a slow tracker; further ones are dropped"""
CALL_S = 120.0
"""after which a call counts as hung; the first one may import a library and wait for a remote server"""
END_S = 60.0
"""for all trackers together to send what they have at the end of a run"""
Told = Callable[[Tracker], None]

EVERY, THINNED_FROM = 20, 1000
"""of the first thousand steps, and of the next, every 20th; of twice as many, every 40th, and so on: fifty each time"""
AFTER_FORMING = 2
"""steps after a formation that are kept as well: recoveries are timed and drawn by them"""
TOGETHER = 100
"""steps whose bytes are written as one sum per worker; a controller that is killed loses up to this many"""


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


class Beside:
    """Sends events to a tracker in order. A tracker that has failed, or hangs, receives nothing more.

    A thread cannot be killed: one that hangs stays behind, and ends with the process.
    """

    def __init__(self, name: str, tracker: Tracker, most: int = MOST_CALLS, call_s: float = CALL_S) -> None:
        self._name, self._tracker, self._most, self._call_s = name, tracker, most, call_s
        self._queue: SimpleQueue[Told | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._since: float | None = None
        """when the call under way began"""
        self._failure = ""
        self._slow = self._said_slow = self._left = False

    def tell(self, told: Told) -> None:
        """Have this called when everything before it was."""
        if self._left:
            return
        if self._queue.qsize() >= self._most:
            self._slow = True
            return
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put(told)

    def trouble(self) -> str:
        """Return a new problem of the tracker, for the log; empty if there is none. Each is reported once."""
        if self._left:
            return ""
        since = self._since
        if not self._failure and since is not None and time.monotonic() - since > self._call_s:
            self._failure = f"it has not answered for {self._call_s:g} s"
        if self._failure:
            self._left = True
            return f"going on without {self._name} ({self._failure})"
        if self._slow and not self._said_slow:
            self._said_slow = True
            return f"{self._name} is slow: more than {self._most} things wait for it, and it misses what comes beyond"
        return ""

    def finish(self, until: float) -> None:
        """Have it closed, and wait for that until this monotonic time; :meth:`trouble` tells how it went."""
        if self._thread.ident is None or self._left:
            return
        self._queue.put(lambda tracker: tracker.close())
        self._queue.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and not self._failure:
            self._failure = "it did not come to its end in time"

    def _work(self) -> None:
        while (told := self._queue.get()) is not None and not self._left:
            self._since = time.monotonic()
            try:
                told(self._tracker)
            except (Exception, SystemExit) as error:  # no run ends because of a tracker's error
                why = getattr(error, "strerror", None) or error
                self._failure = f"{type(error).__name__}: {why}"
                return
            self._since = None


def every(step: int) -> int:
    """Of the steps around ``step``, every how manieth keeps its spans."""
    return EVERY << max(0, (step // THINNED_FROM).bit_length() - 1)


class Sample:
    """Thins what workers did. No byte that was sent is lost: those of steps without spans are added up. No peak is."""

    def __init__(self) -> None:
        self._formed: dict[int, int] = {}
        """replica → its step when it was last formed"""
        self._sums: dict[int, tuple[float, e.Worked]] = {}
        """node → what is not written down yet, as of its last step"""

    def form(self, replica: int, step: int) -> None:
        """The replica is formed again, and continues from ``step``."""
        self._formed[replica] = step

    def take(self, t: float, worked: e.Worked, replica: int) -> list[tuple[float, e.Worked]]:
        """What is to be written down now, with its times: spans of steps that are kept, sums of bytes of the others."""
        since = worked.step - self._formed.get(replica, 0)
        if worked.dropped or since <= AFTER_FORMING or worked.step % every(worked.step) == 0:
            before = self._sums.pop(worked.node, None)
            return [*([before] if before else []), (t, worked)]
        before = self._sums.get(worked.node)
        bare = worked.model_copy(update={"spans": []})
        if before is None or not _together(before[1], worked):
            self._sums[worked.node] = t, bare
            return [before] if before else []
        self._sums[worked.node] = t, bare.model_copy(update=_sum(before[1], worked))
        return []

    def rest(self) -> list[tuple[float, e.Worked]]:
        """What is left to be written down at the end."""
        left = list(self._sums.values())
        self._sums.clear()
        return left


def _sum(one: e.Worked, other: e.Worked) -> dict[str, object]:
    """What both sent, by the other end; and the most memory of both."""
    sent = {
        peer: one.sent_bytes.get(peer, 0) + other.sent_bytes.get(peer, 0) for peer in one.sent_bytes | other.sent_bytes
    }
    most = {name: max(getattr(one, name), getattr(other, name)) for name in ("peak_bytes", "device_peak_bytes")}
    return {"sent_bytes": sent, **most}


def _together(one: e.Worked, other: e.Worked) -> bool:
    """Did the same worker do both, in the same generation and hundred of steps?"""
    return (one.worker, one.generation, one.step // TOGETHER) == (
        other.worker,
        other.generation,
        other.step // TOGETHER,
    )
