"""Measurements of a worker: its work, summed over a few steps, and the peak memory of its process."""

from __future__ import annotations

import re
import resource
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import torch

from planaria.control.facts.events import Span
from planaria.control.facts.measurements import STEPS_PER_REPORT, EdgeTravelTimes, PassDurations
from planaria.control.facts.update_reports import three_digits

Pass = Literal["forward", "backward"]


class WorkerGauge:
    """Sums up the committed steps of a worker."""

    def __init__(self, every: int = STEPS_PER_REPORT) -> None:
        """``every``: steps in a report."""
        self._every = every
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._seconds = self._read_s = 0.0
        self._passes: defaultdict[str, list[float]] = defaultdict(list)
        self._waited: defaultdict[int, float] = defaultdict(float)
        self._transits: defaultdict[int, list[float]] = defaultdict(list)

    def add_step(
        self,
        step: int,
        seconds: float,
        spans: Iterable[Span],
        waited: Mapping[int, float],
        transits: Mapping[int, Sequence[float]],
        read_s: float = 0.0,
    ) -> dict[str, Any] | None:
        """Add a step, and return the fields of ``control.facts.measurements.WorkerMeasurements`` if a report is due.

        All workers report after the same steps.

        :param waited: node → seconds spent waiting for it
        :param transits: node → seconds of each of its frames
        :param read_s: seconds spent reading batches
        """
        self._steps += 1
        self._seconds += seconds
        self._read_s += read_s
        for span in spans:
            if span.action in get_args(Pass):
                self._passes[span.action].append(span.end - span.start)
        for node, wait_s in waited.items():
            self._waited[node] += wait_s
        for node, frames in transits.items():
            self._transits[node] += frames
        if (step + 1) % self._every:
            return None
        report = self._report()
        self._reset()
        return report

    def drop(self) -> None:
        """Discard the steps since the last report, because the worker has another stage."""
        self._reset()

    def _report(self) -> dict[str, Any]:
        passes = {
            kind: PassDurations(count=len(durations), median_s=three_digits(median(durations)))
            for kind, durations in self._passes.items()
        }
        flows = {
            node: EdgeTravelTimes(
                frames=len(transits),
                low_s=round(quantile(transits, 0.25), 5),
                high_s=round(quantile(transits, 0.95), 5),
            )
            for node, transits in self._transits.items()
            if transits
        }
        waited = {node: three_digits(wait_s) for node, wait_s in self._waited.items()}
        report = {"steps": self._steps, "seconds": three_digits(self._seconds), "passes": passes, "waited": waited}
        return report | {"flows": flows, "read_s": three_digits(self._read_s / self._steps)}


def quantile(numbers: Sequence[float], share: float) -> float:
    """Return the quantile of the numbers at this share, one of them."""
    return sorted(numbers)[min(len(numbers) - 1, int(share * len(numbers)))]


_UNIT = 1 if sys.platform == "darwin" else 1024
"""bytes in a unit of the system's counter"""


class Peaks(NamedTuple):
    """Peak memory in bytes, for ``control.facts.reports.WorkReport``."""

    peak_bytes: int
    """resident memory, pages shared with other processes included"""
    device_peak_bytes: int
    """tensors on the CUDA device; 0 while none is in use"""


def peaks() -> Peaks:
    """Return the peaks since the process began. Takes less than 0.1 ms."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.max_memory_allocated() if used else 0
    return Peaks(_resident_peak(), device)


def _resident_peak() -> int:
    """Return the bytes of the largest resident memory; without /proc, a new process begins with its parent's."""
    with suppress(OSError):
        if found := re.search(rb"VmHWM:\s*(\d+)", Path("/proc/self/status").read_bytes()):
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
