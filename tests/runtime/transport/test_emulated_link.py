"""Arrival times of frames over an emulated link."""

from __future__ import annotations

import pytest

from planaria.runtime.transport.emulated_link import EmulatedLink


@pytest.mark.parametrize(
    ("link", "arrivals"),
    [
        (EmulatedLink(0.2, 100.0), [1.2 + 0.5, 1.2 + 1.0, 1.2 + 1.25, 5.0 + 0.2 + 0.5]),
        (EmulatedLink(0.2, 100.0, latency_queued=True), [1.7, 2.4, 2.85, 5.7]),
        (EmulatedLink(0.2, None), [1.2, 1.2, 1.2, 5.2]),
        (EmulatedLink(0.2, None, latency_queued=True), [1.2, 1.4, 1.6, 5.2]),
    ],
)
def test_frames_queue_for_the_bandwidth(link: EmulatedLink, arrivals: list[float]) -> None:
    """Three frames of 50, 50 and 25 bytes at once, and one after a pause."""
    sent = [(1.0, 50), (1.0, 50), (1.0, 25), (5.0, 50)]
    assert [link.arrival(ready, nbytes) for ready, nbytes in sent] == pytest.approx(arrivals)
