"""A completion during a round; each step of the round fills in its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from planaria.swarm.config.swarm_config import SamplingConfig
from planaria.swarm.policy.base import Policy, Prompting, encode_prompt
from planaria.swarm.policy.reading import UNREAD, CompletionStatistics, read_completions
from planaria.swarm.tasks.base import Behaviour, TaskProblem


class PromptedProblem(NamedTuple):
    """A problem with its prompt for a policy, encoded once in a round."""

    problem: TaskProblem
    prompt: tuple[int, ...]


def prompt_for(problem: TaskProblem, policy: Policy) -> PromptedProblem:
    """Return the problem with its prompt for ``policy``."""
    ids = policy.prompt(problem) if isinstance(policy, Prompting) else encode_prompt(policy, problem.prompt)
    return PromptedProblem(problem, tuple(ids))


PromptByNumber = Callable[[int], PromptedProblem]
"""returns the prompt of a problem's number"""


@dataclass(frozen=True)
class Rollout:
    """One completion of one problem, read with this peer's own tokenizer."""

    problem: TaskProblem
    prompt: tuple[int, ...]
    text: str
    ids: tuple[int, ...]
    """including the end token, if it ended; the end is trained like every other token"""
    ended: bool
    logps: tuple[float, ...] | None = None
    """the generator's claim for each of ``ids``, or None if tokenizers differ or it made none"""
    poison: bool = False
    """known to its author and to the drill that counts it"""
    peer: str = ""
    account: str = ""
    """account it is counted under: the one shared by unknown peers, or its peer if empty"""
    round: int = 0
    version: int = 0
    """round of the weights that drew it"""
    index: int = 0
    """index among the peer's completions of the problem"""
    reward: float = 0.0
    """reward by this peer's own scoring"""
    behaviour: Behaviour = ()
    """results on which peers vote"""
    penalty: float = 0.0
    """length penalty, at most 0"""
    declares_same_weights: bool = False
    """the generator declares the reader's weights and tokenizer"""
    claimed: float | None = None
    """the generator's claim for the whole text, if its tokens differ from ``ids``"""
    reading: CompletionStatistics = field(default=UNREAD, compare=False)
    layer: str = ""
    """layer of the defence that rejected it; empty if accepted"""
    reason: str = ""
    passed: tuple[str, ...] = ()
    """layers without objection"""
    proven: bool = True
    """confirmed by every active layer; unconfirmed completions are never rewarded"""
    advantage: float | None = None
    """None if it is not learned from"""

    @property
    def effective_account(self) -> str:
        return self.account or self.peer

    @property
    def score(self) -> float:
        """Return reward plus penalty, by which a group is compared."""
        return self.reward + self.penalty

    def with_vote_reward(self, reward: float | None) -> Rollout:
        """Return the rollout with the vote's reward; without a label, also without penalty: its group has no spread."""
        return replace(self, reward=0.0, penalty=0.0) if reward is None else replace(self, reward=reward)

    def with_reading(self, reading: CompletionStatistics) -> Rollout:
        """Add a policy's reading; spread a claim for the whole text, under another tokenizer, over the tokens.

        Each token's ratio is then the sequence's geometric mean, exp((log π_θ − log π_gen) / T), and so is the
        divergence: Σ log p of a text does not depend on the tokenization, if both tokenizers use their canonical one.
        """
        if self.claimed is None:
            return replace(self, reading=reading)
        shift = (math.fsum(reading.logps) - self.claimed) / len(self.ids)
        return replace(self, reading=reading, logps=tuple((reading.logps - shift).tolist()))

    @property
    def name(self) -> tuple[str, int, int, int]:
        return self.peer, self.round, self.problem.number, self.index


def read_rollouts(policy: Policy, rollouts: Sequence[Rollout], sampling: SamplingConfig) -> list[Rollout]:
    """Return completions with the policy's readings, at the temperature and support of ``sampling``."""
    pairs = [(rollout.prompt, rollout.ids) for rollout in rollouts]
    readings = read_completions(policy, pairs, sampling.temperature, sampling.support(policy.vocab))
    return [rollout.with_reading(reading) for rollout, reading in zip(rollouts, readings, strict=True)]
