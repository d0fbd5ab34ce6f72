"""Drawing ahead of learning: completions of round n + k while round n is learned (``rounds.ahead`` = k).

Round n is always drawn with the weights before round n − k, and published when it begins. A server draws while the
peer learns, from a copy of these weights. Without one, the policy draws when the round begins, after it loaded the old
weights. Both write the same completions, so the second is the control of the first: old weights, no overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.weight_versions import WeightVersion, WeightVersions
from planaria.swarm.peer.completion_authors import Author
from planaria.swarm.peer.rollout import PromptedProblem, Rollout
from planaria.swarm.records.lines import Serving
from planaria.swarm.serving.remote_sampling import PeerServer


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


def due(number: int, ahead: int, count: int, begun: Collection[int]) -> list[int]:
    """Return the rounds to begin drawing when round ``number`` of ``count`` begins."""
    return [n for n in range(number, min(number + ahead, count - 1) + 1) if n not in begun]


class Draws:
    """Draws a peer's completions, each round with its version of the weights."""

    def __init__(
        self,
        config: SwarmConfig,
        versions: WeightVersions,
        author: Author,
        server: PeerServer | None,
        prompts: Callable[[int], Sequence[PromptedProblem]],
        completions: int,
    ) -> None:
        """``prompts`` returns the problems of a round. ``completions``: per problem. The policy of ``server`` must be
        the author's and, if draws overlap with learning, a copy of the trained one."""
        self._rounds = config.rounds
        self._versions, self._author, self._server = versions, author, server
        self._prompts, self._completions = prompts, completions
        self._worker = ThreadPoolExecutor(1, "planaria-ahead") if config.draws_during_learning else None
        self._begun: dict[int, Future[Draw]] = {}

    def take(self, number: int, prompts: Sequence[PromptedProblem]) -> Draw:
        """Return the completions of round ``number``, once they are drawn, and begin to draw later rounds."""
        if self._worker is None:
            with self._versions.loaded(self._versions.drawing(number).round) as version:
                return self._draw(number, version, prompts)
        self._begun = {n: draw for n, draw in self._begun.items() if n >= number}
        for later in due(number, self._rounds.ahead, self._rounds.count, self._begun):
            chosen = prompts if later == number else self._prompts(later)
            self._begun[later] = self._worker.submit(
                self._draw_in_background, later, self._versions.drawing(later), chosen
            )
        return self._begun.pop(number).result()

    def forget(self) -> None:
        """Drop all draws of rounds to come: the peer returned to earlier weights."""
        for draw in self._begun.values():
            draw.cancel()
        wait(self._begun.values())
        self._begun.clear()
        if self._server is not None and self._rounds.ahead:
            self._server.forget()

    def close(self) -> None:
        """Begin no further draws."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)

    def _draw_in_background(self, number: int, version: WeightVersion, prompts: Sequence[PromptedProblem]) -> Draw:
        assert self._server is not None
        version.load(self._server.policy)
        return self._draw(number, version, prompts)

    def _draw(self, number: int, version: WeightVersion, prompts: Sequence[PromptedProblem]) -> Draw:
        written = self._author.write(number, prompts, self._completions)
        serving = None if self._server is None else self._server.found
        if serving is None or serving.local:
            return Draw(written, version.round, self._author.claimed_weights(version.digest), serving)
        return Draw(written, number - serving.behind, "", serving)
