"""What scoring may take: programs that never end cost every reader their whole time limit, one after the other."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from planaria.swarm.config import CONSENSUS, SwarmConfig
from planaria.swarm.tasks.base import Behaviour, Problem, Task, as_reward

NOTHING: Mapping[tuple[str, int, int], float] = {}

SECONDS = 30.0
"""for all that one peer, or all strangers together, sent for a round"""
LEAST = 1 / 16
"""of them, for a peer that used them up again and again"""


class Scored(NamedTuple):
    """What a completion is worth, as far as that can be told of it alone."""

    reward: float = 0.0
    """by the task's own score; 0 where peers vote instead"""
    behaviour: Behaviour = ()
    """what it does, where peers vote on that"""


class Scoring:
    """Scores completions within each account's time, which is halved when it was used up and doubled when it was not.

    Time depends on the machine: peers with equal weights drift apart where one ran out of it and another did not, as
    they do where a program's own limit is near.
    """

    def __init__(
        self, task: Task, clock: Callable[[], float] = time.monotonic, config: SwarmConfig | None = None
    ) -> None:
        """``config``: says whether peers vote; they do not, unless given."""
        self._task, self._clock, self._draw = task, clock, 0
        self._voting = config is not None and config.task.reward == CONSENSUS
        self._filtering = config is not None and config.defence.consensus
        self._part: dict[str, float] = defaultdict(lambda: 1.0)
        self._used: dict[str, float] = defaultdict(float)
        self._given = NOTHING
        self.rewards: dict[tuple[str, int, int], float] = {}
        """(peer, problem, index) → reward, of this round"""
        self.flawed: dict[str, str] = {}
        """peer → why the first flawed reward of its completions in this round is one"""

    @property
    def votes(self) -> bool:
        """Whether peers vote on anything."""
        return self._voting or self._filtering

    def begin(self, given: Mapping[tuple[str, int, int], float] = NOTHING, draw: int = 0) -> None:
        """A round begins. ``given`` are rewards that need not be found again; ``draw``: a number that nobody knew when
        its completions were written."""
        self._given, self.rewards, self.flawed, self._draw = given, {}, {}, draw
        for account, part in list(self._part.items()):
            over = self._used[account] >= self.seconds(account)
            self._part[account] = max(LEAST, part / 2) if over else min(1.0, part * 2)
        self._used.clear()

    def seconds(self, account: str) -> float:
        """That it may take in a round; the last completion may take longer, since none is broken off."""
        return SECONDS * self._part[account]

    def score(self, problem: Problem, text: str, account: str, peer: str = "", index: int = 0) -> Scored | None:
        """What ``peer``'s completion that ended is worth; None when the account's time is over."""
        name = peer, problem.number, index
        if name in self._given:
            return Scored(self._given[name])
        if self._used[account] >= self.seconds(account):
            return None
        began = self._clock()
        found = self.scored(problem, text, peer)
        self._used[account] += self._clock() - began
        self.rewards[name] = found.reward
        return found

    def scored(self, problem: Problem, text: str, peer: str = "") -> Scored:
        """The same, however long it takes."""
        if self._voting:
            return Scored(0.0, self._task.behaviour(problem, text, self._draw))
        reward, flaw = as_reward(self._task.score(problem, text))
        if flaw:
            self.flawed.setdefault(peer, f"{self._task.name}, problem {problem.number}: {flaw}")
        if not self._filtering or reward <= 0:
            return Scored(reward)
        return Scored(reward, self._task.behaviour(problem, text, self._draw, untested=True))
