"""Selection of the work reports that a run's log keeps."""

from __future__ import annotations

from planaria.control.facts import events as e

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
