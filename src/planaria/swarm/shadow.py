"""The shadow: what this peer would be, had it stayed alone. The same start, the same problems, its own draws only."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.swarm.authors import HonestAuthor
from planaria.swarm.checks.base import Case
from planaria.swarm.config import SwarmConfig
from planaria.swarm.evaluation import Examiner, Standing
from planaria.swarm.learning.learner import Learner
from planaria.swarm.learning.lessons import lessons
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import Reading
from planaria.swarm.policy.rollout import Sample
from planaria.tasks.base import Problem, Task


class Shadow:
    """A second policy that generates as many completions as its peer does, and learns from no others."""

    def __init__(self, config: SwarmConfig, name: str, task: Task, policy: Policy) -> None:
        self._config, self._task, self._policy = config, task, policy.clone()
        self._author = HonestAuthor(config, name, task, self._policy)
        self.learner = Learner(
            self._policy, config.loss, config.optim, config.sampling.temperature, config.rounds.count
        )

    def round(self, number: int, problems: Sequence[Problem], count: int) -> None:
        """Generate ``count`` completions of every problem and learn from them."""
        written = self._author.draw(problems, count, "shadow", number)
        cases = [
            Case(
                Sample(
                    "alone",
                    number,
                    problem.number,
                    index,
                    w.text,
                    w.ids,
                    w.ended,
                    self._task.score(problem, w.text) if w.ended else 0.0,
                    w.logps,
                ),
                problem,
                Reading.unread(),
            )
            for problem, texts in zip(problems, written, strict=True)
            for index, w in enumerate(texts)
        ]
        loss, limit = self._config.loss, self._config.sampling.max_new
        found = lessons(cases, "horizontal", loss.kind != "dr_grpo", 1.0, limit, loss.overlong)
        self.learner.learn(number, found.taken)

    def examined(self, examiner: Examiner) -> Standing:
        return examiner.examine(self._policy)
