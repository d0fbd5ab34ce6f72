"""Author of a peer's completions, and its draws; :mod:`planaria.swarm.attacks.attacker` has the author of poison.

With ``rounds.ahead`` = k, completions of round n + k are drawn while round n is learned: round n is always drawn with
the weights before round n − k, and published when it begins. A server draws from a copy of these weights while the peer
learns. Without a server, the policy loads the old weights when the round begins, and draws. Both write the same
completions, so the second is the control of the first: the same staleness, no overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from planaria.swarm.completions.remote_sampling import RemoteSampler
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.weight_versions import WeightVersion, WeightVersions
from planaria.swarm.peer.random_draws import chosen_problems, generator
from planaria.swarm.peer.rollout import PromptedProblem, Rollout
from planaria.swarm.policy.base import Policy, SampledCompletion
from planaria.swarm.records.lines import Serving
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
        task = self._task
        return chosen_problems(self._config.seed, self._name, round_number, task.training, count, task.chooses)

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


@dataclass(frozen=True)
class Draw:
    """A peer's completions of a round."""

    completions: Sequence[Sequence[Rollout]]
    """completions of each problem"""
    version: int
    """round of the weights that drew them"""
    weights: str
    """fingerprint to publish; empty if a server drew, whose weights are not known"""
    serving: Serving | None
    """work of the server, if the peer has one"""


def rounds_to_draw(round_number: int, ahead: int, count: int, begun: Collection[int]) -> list[int]:
    """Return the rounds that begin to be drawn when round ``round_number`` of ``count`` begins."""
    return [n for n in range(round_number, min(round_number + ahead, count - 1) + 1) if n not in begun]


class Draws:
    """Draws a peer's completions, each round with its version of the weights."""

    def __init__(
        self,
        config: SwarmConfig,
        versions: WeightVersions,
        author: Author,
        server: RemoteSampler | None,
        prompts: Callable[[int], Sequence[PromptedProblem]],
        completions: int,
    ) -> None:
        """Draw with ``author``.

        :param server: its policy must be the author's and, if draws overlap with learning, a copy of the trained one
        :param prompts: returns the problems of a round
        :param completions: number of completions per problem
        """
        self._rounds = config.rounds
        self._versions, self._author, self._server = versions, author, server
        self._prompts, self._completions = prompts, completions
        self._worker = ThreadPoolExecutor(1, "planaria-ahead") if config.draws_during_learning else None
        self._futures: dict[int, Future[Draw]] = {}

    def collect(self, round_number: int, prompts: Sequence[PromptedProblem]) -> Draw:
        """Return the completions of a round, once they are drawn, and begin to draw later rounds."""
        if self._worker is None:
            with self._versions.load_version(self._versions.drawing_version(round_number).round) as version:
                return self._draw(round_number, version, prompts)
        self._futures = {n: draw for n, draw in self._futures.items() if n >= round_number}
        for later in rounds_to_draw(round_number, self._rounds.ahead, self._rounds.count, self._futures):
            chosen = prompts if later == round_number else self._prompts(later)
            self._futures[later] = self._worker.submit(
                self._draw_in_background, later, self._versions.drawing_version(later), chosen
            )
        return self._futures.pop(round_number).result()

    def forget(self) -> None:
        """Drop all draws of later rounds: the peer returned to earlier weights."""
        for draw in self._futures.values():
            draw.cancel()
        wait(self._futures.values())
        self._futures.clear()
        if self._server is not None and self._rounds.ahead:
            self._server.force_push()

    def close(self) -> None:
        """Begin no further draws."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)

    def _draw_in_background(
        self, round_number: int, version: WeightVersion, prompts: Sequence[PromptedProblem]
    ) -> Draw:
        assert self._server is not None
        version.load(self._server.policy)
        return self._draw(round_number, version, prompts)

    def _draw(self, round_number: int, version: WeightVersion, prompts: Sequence[PromptedProblem]) -> Draw:
        written = self._author.write(round_number, prompts, self._completions)
        serving = None if self._server is None else self._server.last_stats
        if serving is None or serving.local:
            return Draw(written, version.round, self._author.claimed_weights(version.digest), serving)
        return Draw(written, round_number - serving.behind, "", serving)
