"""An emulated link: the times at which frames of a given latency and bandwidth would arrive."""

from __future__ import annotations


class EmulatedLink:
    """Frames queue for the bandwidth. Several edges of a worker may share a link, as behind a home router."""

    def __init__(self, latency_s: float, bandwidth: float | None, latency_queued: bool = False) -> None:
        """``bandwidth``: bytes per second; None: unlimited. ``latency_queued``: the latency is part of the time in the
        queue; otherwise latencies overlap.
        """
        self._latency_s = latency_s
        self._bandwidth = bandwidth
        self._latency_queued = latency_queued
        self._free = 0.0

    def arrival(self, ready: float, nbytes: int) -> float:
        """Return when a frame of ``nbytes`` arrives that could be sent at ``ready`` (monotonic seconds)."""
        self._free = max(self._free, ready)
        if self._bandwidth is not None:
            self._free += nbytes / self._bandwidth
        if self._latency_queued:
            self._free += self._latency_s
            return self._free
        return self._free + self._latency_s
