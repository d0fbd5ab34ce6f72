"""How long a worker waits for a neighbour before it calls the edge between them broken."""

from __future__ import annotations

from collections import deque

_TIMES = 3
"""how many times as long as a whole step one message of it may take"""
_REMEMBERED = 16
"""steps; a machine that was busy may be so no longer"""


class Patience:
    """Scaled by what steps have taken in this run, never less than the recipe's number of seconds.

    Before there was a step, by what the first pass of this worker has taken: on a busy machine that is long too.
    """

    def __init__(self, floor_s: float) -> None:
        self.warm_s = 0.0
        """seconds of one forward, backward and update at the worker's birth"""
        self._floor_s, self._actions = floor_s, 1
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)

    def expect(self, actions: int) -> None:
        """So many actions, of all workers together, make the step that begins."""
        self._actions = actions

    def learn(self, step_s: float) -> None:
        """A step is over; it took so many seconds."""
        self._steps.append(step_s)

    @property
    def seconds(self) -> float:
        """How long to wait now."""
        usual = max(self._steps) if self._steps else self.warm_s * self._actions / 2  # a pass each way is two actions
        return max(self._floor_s, _TIMES * usual)
