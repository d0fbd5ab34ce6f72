"""Author of a peer's completions; :mod:`planaria.swarm.attacks.attacker` has the author of poison."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.swarm.completions.remote_sampling import RemoteSampler
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.peer.random_draws import chosen_problems, generator
from planaria.swarm.peer.rollout import PromptedProblem, Rollout
from planaria.swarm.policy.base import Policy, SampledCompletion
from planaria.swarm.tasks.base import Task


class Author:
    """Source of a peer's completions: draws from the policy, or from its server."""

    def __init__(
        self, config: SwarmConfig, name: str, task: Task, policy: Policy, server: RemoteSampler | None = None
    ) -> None:
        """Draw from ``policy``.

        :param server: draws the published completions while it is available
        """
        self._config = config
        self._name = name
        self._task = task
        self._policy = policy
        self._server = server

    def choose(self, round_number: int, count: int) -> list[int]:
        """Choose ``count`` problems for a round, in vertical mode."""
        return chosen_problems(self._config.seed, self._name, round_number, self._task.training, count, lambda _: True)

    def write(self, round_number: int, requested: Sequence[PromptedProblem], count: int) -> list[list[Rollout]]:
        """Return ``count`` completions per problem."""
        if self._server is not None:
            served = self._server.draw(round_number, [prompt for _, prompt in requested], count)
            if served is not None:
                return self._make_rollouts(requested, served)
        return self.draw(requested, count, "completions", round_number)

    def sends(self, round_number: int) -> bool:
        """Return whether it sends anything in a round."""
        return True

    def claimed_weights(self, weights: str) -> str:
        """Return the fingerprint to publish for weights with the fingerprint ``weights``."""
        return weights

    def draw(self, requested: Sequence[PromptedProblem], count: int, *purpose: object) -> list[list[Rollout]]:
        """Draw ``count`` completions per problem, deterministically per purpose."""
        policy, sampling = self._policy, self._config.sampling
        result = policy.sample(
            [prompt for _, prompt in requested],
            count,
            sampling.max_new,
            sampling.temperature,
            sampling.support(policy.vocab),
            generator(self._config.seed, self._name, *purpose),
        )
        return self._make_rollouts(requested, result)

    def _make_rollouts(
        self, requested: Sequence[PromptedProblem], completions: Sequence[Sequence[SampledCompletion]]
    ) -> list[list[Rollout]]:
        policy = self._policy
        return [
            [
                Rollout(
                    *each,
                    text=policy.decode(drawn.ids),
                    ids=(*drawn.ids, policy.end) if drawn.ended else drawn.ids,
                    ended=drawn.ended,
                    logps=drawn.logps or None,
                )
                for drawn in draws
            ]
            for each, draws in zip(requested, completions, strict=True)
        ]
