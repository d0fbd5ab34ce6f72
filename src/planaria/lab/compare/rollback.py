"""Rollbacks in races: saves that become durable later, and the steps that rollbacks repeat."""

from __future__ import annotations

import math
from typing import Literal

MAX_EXPONENT = 700.0
"""largest exponent of e that a float holds"""


class PendingSave:
    """The pending save, durable ``ticks`` after it began; 0: immediately."""

    def __init__(self, ticks: int) -> None:
        self._ticks, self._under_way = ticks, (-1, -1)

    def due(self, step: int, every: int, durable: int) -> bool:
        """Whether to save ``step`` when step ``durable`` is durable."""
        return self._under_way[0] < 0 and step // every > durable // every

    def begin(self, tick: int, step: int, durable: int) -> int:
        """Save the state of ``step``; return the newest durable step."""
        self._under_way = tick + self._ticks, step
        return self.newest_durable(tick, durable)

    def newest_durable(self, tick: int, durable: int) -> int:
        """Return the newest durable step after ``tick`` ticks; ``durable`` before that."""
        due, step = self._under_way
        if due < 0 or tick < due:
            return durable
        self.abort()
        return step

    def abort(self) -> None:
        """Abort the pending save after a loss."""
        self._under_way = (-1, -1)


def rollback_mean(every: int, p: float, counted: Literal["steps", "ticks"] = "steps", behind: int = 0) -> float:
    """Return the mean ticks per useful step of a long run, if a loss precedes each tick with probability ``p``.

    A loss returns all stages to the last durable save, and the tick is executed from there. Saves follow every
    ``every`` committed steps, as in planaria's runs, or executed steps if ``counted`` is 'ticks' (CheckFree, arXiv
    2506.15461).

    With q = 1 − p and f = ``every``. Counted in ticks: f ticks keep the steps after their last failure, 1 + q + … +
    q^(f−1) = (1 − q^f) / p on average. Counted in steps: f steps take one tick, then f − 1 ticks in a row without
    failure, reached after (q^−(f−1) − 1) / p ticks on average.

    With saves d = ``behind`` ≤ f ticks late: from one durable save to the next, f ticks, or fewer if one fails,
    (1 − q^f) / p on average. If one fails, with probability 1 − q^f, f + d steps follow: one, then f + d − 1 in a
    row. Together (1 − q^f) · q^(1−f−d) / p ticks for f steps. The result is infinite if it exceeds a float.

    :raises ValueError: if a save is later than the next, or background saves are counted in ticks.
    """
    if behind > every or (behind and counted == "ticks"):
        raise ValueError(f"saves {behind} ticks late must not be later than the next, {every} {counted} on")
    if p == 0.0:
        return 1.0
    q = 1.0 - p
    if counted == "ticks":
        return every * p / (1.0 - q**every)
    exponent = (1 - every - behind) * math.log(q) if q > 0.0 else math.inf
    return (1.0 - q**every) * math.exp(exponent) / (p * every) if exponent < MAX_EXPONENT else math.inf
