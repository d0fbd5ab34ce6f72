"""Sums over a run's events, and the selection of work reports that its log keeps."""

from __future__ import annotations

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import Metric
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.tally import RunTally
from planaria.report.run.metrics import StepMetrics
from planaria.report.run.naming import Naming

EVERY, THINNED_FROM = 20, 1000
"""every 20th of the first 2,000 steps is logged, every 40th of the next 2,000, every 80th of the next 4,000, …"""
AFTER_FORMING = 2
"""steps after a formation that are logged too, to time and draw recoveries"""
STEPS_PER_SUM = 100
"""steps whose bytes are logged as one sum per worker; a killed controller loses at most these"""


class RunAccount:
    """Sums over the events of a run: the display's numbers, tallies, metrics and names of workers.

    A standby keeps it while it waits.
    """

    def __init__(self, tokens_per_step: int, progress: NoProgress) -> None:
        self.progress = progress
        self.tally, self.metrics = RunTally(), StepMetrics(tokens_per_step)
        self.naming, self.sample = Naming(), ReportSampling()

    def recall(self, t: float, fact: e.Event | d.Decision) -> Metric | None:
        """Take an event or decision of another controller; return the measurements that it completes."""
        if isinstance(fact, e.RunStarted):
            self.naming = Naming(fact)
        self.progress.recall(t, fact)
        self.tally.take(t, fact)
        if isinstance(fact, d.Form):
            self.sample.form(fact.replica, fact.step)
        return self.metrics.take(t, fact)


def span_interval(step: int) -> int:
    """Return the interval at which steps around ``step`` are logged with their spans."""
    return EVERY << max(0, (step // THINNED_FROM).bit_length() - 1)


class ReportSampling:
    """Thins work reports: drops the spans of most steps, but keeps all byte counts and memory peaks."""

    def __init__(self) -> None:
        self._formed: dict[int, int] = {}
        """replica → its step at its last formation"""
        self._sums: dict[int, tuple[float, e.WorkReport]] = {}
        """node → time and sum of reports that are not logged yet"""

    def form(self, replica: int, step: int) -> None:
        """Note that a replica is formed and continues from ``step``."""
        self._formed[replica] = step

    def take(self, t: float, worked: e.WorkReport, replica: int) -> list[tuple[float, e.WorkReport]]:
        """Return the reports to log now, with their times: selected steps with spans, others summed without."""
        since = worked.step - self._formed.get(replica, 0)
        if worked.dropped or since <= AFTER_FORMING or worked.step % span_interval(worked.step) == 0:
            before = self._sums.pop(worked.node, None)
            return [*([before] if before else []), (t, worked)]
        before = self._sums.get(worked.node)
        bare = worked.model_copy(update={"spans": []})
        if before is None or not _together(before[1], worked):
            self._sums[worked.node] = t, bare
            return [before] if before else []
        self._sums[worked.node] = t, bare.model_copy(update=_sum(before[1], worked))
        return []

    def rest(self) -> list[tuple[float, e.WorkReport]]:
        """Return the reports left to log at the end."""
        left = list(self._sums.values())
        self._sums.clear()
        return left


def _sum(worked: e.WorkReport, later: e.WorkReport) -> dict[str, object]:
    """Add up the bytes sent to each peer, and keep the larger memory peaks."""
    sent = {
        peer: worked.sent_bytes.get(peer, 0) + later.sent_bytes.get(peer, 0)
        for peer in worked.sent_bytes | later.sent_bytes
    }
    most = {name: max(getattr(worked, name), getattr(later, name)) for name in ("peak_bytes", "device_peak_bytes")}
    return {"sent_bytes": sent, **most}


def _together(worked: e.WorkReport, later: e.WorkReport) -> bool:
    """Return whether both reports have the same worker, generation and hundred of steps."""
    same_worker = (worked.worker, worked.generation) == (later.worker, later.generation)
    return same_worker and worked.step // STEPS_PER_SUM == later.step // STEPS_PER_SUM
