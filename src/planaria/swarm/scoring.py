"""What scoring may take: programs that never end cost every reader their whole time limit, one after the other."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from planaria.tasks.base import Problem, Task

NOTHING: Mapping[tuple[str, int, int], float] = {}

SECONDS = 30.0
"""for all that one peer, or all strangers together, sent for a round"""
LEAST = 1 / 16
"""of them, for a peer that used them up again and again"""


class Scoring:
    """Scores completions within each account's time, which is halved when it was used up and doubled when it was not.

    Time depends on the machine: peers with equal weights drift apart where one ran out of it and another did not, as
    they do where a program's own limit is near.
    """

    def __init__(self, task: Task, clock: Callable[[], float] = time.monotonic) -> None:
        self._task, self._clock = task, clock
        self._part: dict[str, float] = defaultdict(lambda: 1.0)
        self._used: dict[str, float] = defaultdict(float)
        self._given = NOTHING
        self.scored: dict[tuple[str, int, int], float] = {}
        """(peer, problem, index) → reward, of this round"""

    def begin(self, given: Mapping[tuple[str, int, int], float] = NOTHING) -> None:
        """A round begins. ``given`` are rewards that need not be found again."""
        self._given, self.scored = given, {}
        for account, part in list(self._part.items()):
            over = self._used[account] >= self.seconds(account)
            self._part[account] = max(LEAST, part / 2) if over else min(1.0, part * 2)
        self._used.clear()

    def seconds(self, account: str) -> float:
        """That it may take in a round; the last completion may take longer, since none is broken off."""
        return SECONDS * self._part[account]

    def score(self, problem: Problem, text: str, account: str, peer: str = "", index: int = 0) -> float | None:
        """The reward of ``peer``'s completion that ended; None when the account's time is over."""
        name = peer, problem.number, index
        if name in self._given:
            return self._given[name]
        if self._used[account] >= self.seconds(account):
            return None
        began = self._clock()
        reward = self._task.score(problem, text)
        self._used[account] += self._clock() - began
        self.scored[name] = reward
        return reward
