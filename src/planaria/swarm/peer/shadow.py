"""A copy of a peer's policy that learns alone, to measure the benefit of collaboration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planaria.swarm.checks.consensus import with_vote_rewards
from planaria.swarm.config.swarm_config import CONSENSUS, SwarmConfig
from planaria.swarm.learning.advantages import round_advantages, with_length_penalty
from planaria.swarm.learning.learner import Learner
from planaria.swarm.peer.author import Author
from planaria.swarm.peer.completion_intake import CompletionScore, Scoring
from planaria.swarm.peer.evaluation import EvaluationResult, Examiner
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.peer.rollout import PromptedProblem
from planaria.swarm.policy.base import Policy
from planaria.swarm.tasks.base import Task


class Shadow:
    """A copy of the policy that generates as many completions as its peer and learns from its own only."""

    def __init__(self, config: SwarmConfig, name: str, task: Task, policy: Policy) -> None:
        self._config, self._policy = config, policy.clone()
        self._scoring = Scoring(task, config=config)
        self._author = Author(config, name, task, self._policy)
        self.learner = Learner(config, self._policy)

    def run_round(self, round_number: int, requested: Sequence[PromptedProblem], count: int) -> None:
        """Generate ``count`` completions per problem and learn from them."""
        loss, limit, versions = self._config.loss, self._config.sampling.max_new, self.learner.versions
        versions.record(round_number)
        with versions.load_version(versions.drawing_version(round_number).round):
            completions = self._author.draw(requested, count, "shadow", round_number)
        self._scoring.begin(draw=derive_seed("shadow", self._config.seed, round_number))
        own = [
            replace(
                r,
                peer="alone",
                **(self._scoring.score_untimed(r.problem, r.text) if r.ended else CompletionScore())._asdict(),
            )
            for drawn in completions
            for r in drawn
        ]
        own = [with_length_penalty(r, limit, loss.overlong) for r in own]
        if self._config.task.reward == CONSENSUS:  # alone, its own most frequent behaviour is the label
            own = with_vote_rewards(own, self._config.task.agreement)
        result = round_advantages(own, "horizontal", loss.kind != "dr_grpo")
        self.learner.learn(round_number, result.rollouts)

    def examine(self, examiner: Examiner) -> EvaluationResult:
        return examiner.examine(self._policy)
