"""When each of n replicas has what they agree on, by when each was ready: collectives and pairs. Pure.

A message takes its latency, log-normal with the same median for all, and its bytes over the slower of the two ends'
links. Every function takes ``ready`` [n], seconds, and gives [n] seconds; lateness of one so becomes lateness of those
who wait for it. ``bytes`` are those of what one replica has to say. What computing sums takes is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Times = np.ndarray
"""seconds, [n]"""


@dataclass(frozen=True)
class Links:
    """Replicas' links, and the draws of messages' latencies."""

    rate: np.ndarray
    """[n] bytes a second, each way; infinite where sending costs nothing but latency"""
    latency_s: float
    """the median of one message's latency"""
    sigma: float
    """standard deviation of its logarithm"""
    draw: np.random.Generator

    def latency(self, count: int | tuple[int, ...]) -> np.ndarray:
        """Seconds of so many messages' latencies."""
        return np.asarray(self.latency_s * self.draw.lognormal(0.0, self.sigma, count))

    def message_s(
        self, source: np.ndarray, target: np.ndarray, bytes: float, trials: tuple[int, ...] = ()
    ) -> np.ndarray:
        """Seconds of messages between these, pair by pair, [trials…, pairs]."""
        takes = bytes / np.minimum(self.rate[source], self.rate[target])
        return np.asarray(self.latency((*trials, len(source))) + takes)


def ring(ready: Times, bytes: float, links: Links) -> Times:
    """All-reduce round a ring: 2(n − 1) messages one after the other, each of an n-th of the bytes."""
    n = len(ready)
    before = np.arange(-1, n - 1)
    takes = bytes / n / np.minimum(links.rate[before], links.rate)
    done, free = ready, np.zeros(n)  # when each can send its next, and when the link to each is free
    for _ in range(2 * (n - 1)):
        free = np.maximum(done[before], free) + takes
        done = np.maximum(done, free + links.latency(n))
    return done


def tree(ready: Times, bytes: float, links: Links) -> Times:
    """All-reduce along a binomial tree: up, where each waits for its own half and the other's message, and down.

    ``ready`` may have axes of trials before its last, [trials…, n].
    """
    lead, n = ready.shape[:-1], ready.shape[-1]
    done, spans = ready.copy(), []
    span = 1
    while span < n:
        upper = np.arange(span, n, 2 * span)
        spans.append(upper)
        lower = upper - span
        told = done[..., upper] + links.message_s(upper, lower, bytes, lead)
        done[..., lower] = np.maximum(done[..., lower], told)
        span *= 2
    for upper in reversed(spans):
        span //= 2
        lower = upper - span
        done[..., upper] = done[..., lower] + links.message_s(lower, upper, bytes, lead)
    return done


def star(ready: Times, bytes: float, links: Links) -> Times:
    """The first replica takes in what the others say, one message after the other, and sends each of them the sum."""
    n, done = len(ready), ready.copy()
    others = np.arange(1, n)
    apiece = bytes / np.minimum(links.rate[0], links.rate[others])
    here = done[0]
    for coming, takes in sorted(zip(done[1:] + links.latency(n - 1), apiece, strict=True)):
        here = max(here, coming) + takes
    done[0] = here
    done[1:] = here + np.cumsum(apiece) + links.latency(n - 1)
    return done


def everyone(ready: Times, bytes: float, links: Links) -> Times:
    """Everyone sends its own to everyone, to its next first: n − 1 messages over each link, each way. Single offers are
    seen, which a robust rule needs."""
    n = len(ready)
    me = np.arange(n)
    done, busy = ready.copy(), ready.copy()
    for k in range(1, n):
        target = (me + k) % n
        busy += bytes / np.minimum(links.rate, links.rate[target])
        done[target] = np.maximum(done[target], busy + links.latency(n))
    return np.asarray(np.maximum(done, busy))


def pairs(ready: Times, bytes: float, links: Links, groups: Sequence[Sequence[int]]) -> Times:
    """Members of each group send each other their own; groups of two make pairs, one alone waits for nobody."""
    done = ready.copy()
    for size in {len(group) for group in groups} - {1}:
        of = np.array([group for group in groups if len(group) == size])
        for shift in range(1, size):
            mine, theirs = of.ravel(), np.roll(of, shift, 1).ravel()
            done[mine] = np.maximum(done[mine], ready[theirs] + links.message_s(theirs, mine, (size - 1) * bytes))
    return done


COLLECTIVES: dict[str, Callable[[Times, float, Links], Times]] = {
    "ring": ring,
    "tree": tree,
    "star": star,
    "everyone": everyone,
}
