"""Measurements of a worker: its work, summed over a few steps, and the peak memory of its process."""

from __future__ import annotations

import resource
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import torch

from planaria.control.events import Span
from planaria.control.gauges import EVERY, Flow, Passes
from planaria.control.offers import three_digits

Pass = Literal["forward", "backward"]


class Gauge:
    """Adds up steps that were not dropped."""

    def __init__(self, every: int = EVERY) -> None:
        """``every``: steps in a report."""
        self._every = every
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._steps, self._seconds, self._read = 0, 0.0, 0.0
        self._passes: defaultdict[str, list[float]] = defaultdict(list)
        self._waited: defaultdict[int, float] = defaultdict(float)
        self._transits: defaultdict[int, list[float]] = defaultdict(list)

    def stepped(
        self,
        step: int,
        seconds: float,
        spans: Iterable[Span],
        waited: Mapping[int, float],
        transits: Mapping[int, Sequence[float]],
        read: float = 0.0,
    ) -> dict[str, Any] | None:
        """Take in a step: its seconds and spans, seconds ``waited`` for each node, from each node the seconds of every
        frame, and the seconds that its batches took to be ``read``. What :class:`Gauged` says of the steps so far, if
        it is time for a report: all workers report after the same steps."""
        self._steps, self._seconds, self._read = self._steps + 1, self._seconds + seconds, self._read + read
        for span in spans:
            if span.action in get_args(Pass):
                self._passes[span.action].append(span.end - span.start)
        for node, took in waited.items():
            self._waited[node] += took
        for node, frames in transits.items():
            self._transits[node] += frames
        if (step + 1) % self._every:
            return None
        told = self._told()
        self._begin_anew()
        return told

    def drop(self) -> None:
        """Forget the steps since the last report: the worker has another stage now."""
        self._begin_anew()

    def _told(self) -> dict[str, Any]:
        passes = {
            kind: Passes(count=len(took), median_s=three_digits(median(took))) for kind, took in self._passes.items()
        }
        flows = {
            node: Flow(
                frames=len(took),
                low_s=round(quantile(took, 0.25), 5),
                high_s=round(quantile(took, 0.95), 5),
            )
            for node, took in self._transits.items()
            if took
        }
        waited = {node: three_digits(took) for node, took in self._waited.items()}
        told = {"steps": self._steps, "seconds": three_digits(self._seconds), "passes": passes, "waited": waited}
        return told | {"flows": flows, "read_s": three_digits(self._read / self._steps)}


def quantile(numbers: Sequence[float], share: float) -> float:
    """The number below which about such a share of them is: one of them."""
    return sorted(numbers)[min(len(numbers) - 1, int(share * len(numbers)))]


_UNIT = 1 if sys.platform == "darwin" else 1024
"""bytes in which the system counts"""


class Peaks(NamedTuple):
    """Bytes, as ``record.telemetry.Worked`` tells them."""

    peak_bytes: int
    """resident memory, pages shared with other processes included"""
    device_peak_bytes: int
    """tensors on the CUDA device; 0 while none is in use"""


def peaks() -> Peaks:
    """Since the process began. Takes microseconds: one system call, and torch's own count."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.max_memory_allocated() if used else 0
    return Peaks(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT, device)
