"""Completion times of collectives and pairwise exchanges among n replicas, given when each is ready. Pure.

A message takes a log-normal latency, with the same median for all, plus its bytes over the slower end's link. Every
function maps ``ready`` [n], seconds, to [n] seconds. ``bytes`` are those of one replica's update. Computing sums is not
included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Times = np.ndarray
"""seconds, [n]"""


@dataclass(frozen=True)
class ReplicaLinks:
    """Replicas' links, and the random latencies of messages."""

    rate: np.ndarray
    """[n] bytes per second, each way; infinite if only latency counts"""
    latency_s: float
    """median latency of one message"""
    sigma: float
    """standard deviation of its logarithm"""
    draw: np.random.Generator

    def latency(self, count: int | tuple[int, ...]) -> np.ndarray:
        """Draw latencies in seconds."""
        return np.asarray(self.latency_s * self.draw.lognormal(0.0, self.sigma, count))

    def message_s(
        self, source: np.ndarray, target: np.ndarray, bytes: float, trials: tuple[int, ...] = ()
    ) -> np.ndarray:
        """Return the seconds of messages between these replicas, pair by pair, [trials…, pairs]."""
        takes = bytes / np.minimum(self.rate[source], self.rate[target])
        return np.asarray(self.latency((*trials, len(source))) + takes)


def ring(ready: Times, bytes: float, links: ReplicaLinks) -> Times:
    """Ring all-reduce: 2(n − 1) consecutive messages, each of an n-th of the bytes."""
    n = len(ready)
    before = np.arange(-1, n - 1)
    takes = bytes / n / np.minimum(links.rate[before], links.rate)
    done, free = ready, np.zeros(n)  # when each can send its next, and when the link to each is free
    for _ in range(2 * (n - 1)):
        free = np.maximum(done[before], free) + takes
        done = np.maximum(done, free + links.latency(n))
    return done


def tree(ready: Times, bytes: float, links: ReplicaLinks) -> Times:
    """All-reduce along a binomial tree, up and down; each waits for its own half and the other's message.

    ``ready`` may have axes of trials before its last, [trials…, n].
    """
    lead, n = ready.shape[:-1], ready.shape[-1]
    done, spans = ready.copy(), []
    span = 1
    while span < n:
        upper = np.arange(span, n, 2 * span)
        spans.append(upper)
        lower = upper - span
        arrival = done[..., upper] + links.message_s(upper, lower, bytes, lead)
        done[..., lower] = np.maximum(done[..., lower], arrival)
        span *= 2
    for upper in reversed(spans):
        span //= 2
        lower = upper - span
        done[..., upper] = done[..., lower] + links.message_s(lower, upper, bytes, lead)
    return done


def star(ready: Times, bytes: float, links: ReplicaLinks) -> Times:
    """The first replica receives all updates, one message after another, and sends the sum to each."""
    n, done = len(ready), ready.copy()
    others = np.arange(1, n)
    apiece = bytes / np.minimum(links.rate[0], links.rate[others])
    here = done[0]
    for coming, takes in sorted(zip(done[1:] + links.latency(n - 1), apiece, strict=True)):
        here = max(here, coming) + takes
    done[0] = here
    done[1:] = here + np.cumsum(apiece) + links.latency(n - 1)
    return done


def everyone(ready: Times, bytes: float, links: ReplicaLinks) -> Times:
    """All-to-all, starting with the next replica: n − 1 messages over each link, each way. Robust rules need single
    updates."""
    n = len(ready)
    me = np.arange(n)
    done, busy = ready.copy(), ready.copy()
    for k in range(1, n):
        target = (me + k) % n
        busy += bytes / np.minimum(links.rate, links.rate[target])
        done[target] = np.maximum(done[target], busy + links.latency(n))
    return np.asarray(np.maximum(done, busy))


def pairs(ready: Times, bytes: float, links: ReplicaLinks, groups: Sequence[Sequence[int]]) -> Times:
    """Members of each group exchange their updates; a group of one does not wait."""
    done = ready.copy()
    for size in {len(group) for group in groups} - {1}:
        of = np.array([group for group in groups if len(group) == size])
        for shift in range(1, size):
            own, theirs = of.ravel(), np.roll(of, shift, 1).ravel()
            done[own] = np.maximum(done[own], ready[theirs] + links.message_s(theirs, own, (size - 1) * bytes))
    return done


COLLECTIVES: dict[str, Callable[[Times, float, ReplicaLinks], Times]] = {
    "ring": ring,
    "tree": tree,
    "star": star,
    "everyone": everyone,
}
