"""The shadow: what this peer would be, had it stayed alone. The same start, the same problems, its own draws only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planaria.swarm.authors import HonestAuthor
from planaria.swarm.checks.consensus import rewarded
from planaria.swarm.config import CONSENSUS, SwarmConfig
from planaria.swarm.draws import derived
from planaria.swarm.evaluation import Examiner, Standing
from planaria.swarm.learning.learner import Learner
from planaria.swarm.learning.lessons import lessons, priced
from planaria.swarm.policy.base import Policy
from planaria.swarm.rollout import Asked
from planaria.swarm.scoring import Scored, Scoring
from planaria.swarm.tasks.base import Task


class Shadow:
    """A second policy that generates as many completions as its peer does, and learns from no others."""

    def __init__(self, config: SwarmConfig, name: str, task: Task, policy: Policy) -> None:
        self._config, self._policy = config, policy.clone()
        self._scoring = Scoring(task, config=config)
        self._author = HonestAuthor(config, name, task, self._policy)
        self.learner = Learner(
            self._policy, config.loss, config.optim, config.sampling.temperature, config.rounds.count
        )

    def round(self, number: int, asked: Sequence[Asked], count: int) -> None:
        """Generate ``count`` completions of every problem and learn from them."""
        loss, limit = self._config.loss, self._config.sampling.max_new
        self._scoring.begin(draw=derived("shadow", self._config.seed, number))
        own = [
            replace(r, peer="alone", **(self._scoring.scored(r.problem, r.text) if r.ended else Scored())._asdict())
            for drawn in self._author.draw(asked, count, "shadow", number)
            for r in drawn
        ]
        own = [priced(r, limit, loss.overlong) for r in own]
        if self._config.task.reward == CONSENSUS:  # alone, what it does itself most often is all that it can go by
            own = rewarded(own, self._config.task.agreement)
        found = lessons(own, "horizontal", loss.kind != "dr_grpo")
        self.learner.learn(number, found.taken)

    def examined(self, examiner: Examiner) -> Standing:
        return examiner.examine(self._policy)
