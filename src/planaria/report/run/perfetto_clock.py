"""One clock for all parts of a run: each has the monotonic clock of its machine, which begins anew when that does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from planaria.control.events import RunStarted
from planaria.control.run_record import RunRecord

SAME_S = 1.0
"""by so much the time of day and the monotonic clock may drift apart, and the clock be the same"""
Item = TypeVar("Item")


class Clock:
    """Times of a record, nanoseconds since the run began. A part that was run later comes later."""

    def __init__(self, record: RunRecord) -> None:
        self._starts = [t for t, _ in record.starts]
        self._generations = [started.first_generation for _, started in record.starts]
        self._offsets: list[float] = []
        """of each part, seconds: what its clock lacks to the first one's"""
        last, epoch = 0.0, 0.0
        for t, fact in record.landmarks:
            if isinstance(fact, RunStarted):
                epoch = epoch if self._offsets else fact.wall_time - t
                apart = fact.wall_time - t - epoch
                apart = 0.0 if abs(apart) <= SAME_S else apart
                self._offsets.append(max(apart, last - t) if self._offsets else 0.0)
            last = t + (self._offsets[-1] if self._offsets else 0.0)
        self._zero = self._starts[0] if self._starts else 0.0

    def ns(self, t: float, part: int) -> int:
        """A moment of a part of the run."""
        offset = self._offsets[part] if self._offsets else 0.0
        return round(1e9 * (t - self._zero + offset))

    def part_of(self, generation: int) -> int:
        """The part of the run in which a generation was formed."""
        return max(0, bisect_left(self._generations, generation) - 1)

    def in_parts(self, items: Iterable[Item], t: Callable[[Item], float]) -> Iterator[tuple[int, Item]]:
        """Items in the order of the log, each with the part that it is of: a clock that goes back is another part's."""
        part, before = 0, float("-inf")
        for item in items:
            now = t(item)
            while part + 1 < len(self._starts) and self._is_later(part, before, now):
                part, before = part + 1, float("-inf")
            before = now
            yield part, item

    def _is_later(self, part: int, before: float, now: float) -> bool:
        here, following = self._starts[part], self._starts[part + 1]
        return now < before or now < here or (following >= here and now >= following)
