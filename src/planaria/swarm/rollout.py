"""A completion on its way through a round: one class, of which each step fills in its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from planaria.swarm.policy.base import Policy, Prompting, encode_prompt
from planaria.swarm.policy.reading import UNREAD, Reading
from planaria.swarm.tasks.base import Behaviour, Problem


class Asked(NamedTuple):
    """A problem as a policy is asked it; encoded once in a round."""

    problem: Problem
    prompt: tuple[int, ...]


def ask(problem: Problem, policy: Policy) -> Asked:
    ids = policy.prompt(problem) if isinstance(policy, Prompting) else encode_prompt(policy, problem.prompt)
    return Asked(problem, tuple(ids))


Asking = Callable[[int], Asked]
"""by the problem's number"""


@dataclass(frozen=True)
class Rollout:
    """One completion of one problem, read with this peer's own tokenizer."""

    problem: Problem
    prompt: tuple[int, ...]
    text: str
    ids: tuple[int, ...]
    """with the end token, if it ended: the end is trained like every other token"""
    ended: bool
    logps: tuple[float, ...] | None = None
    """the generator's claim, one for each of ``ids``; None where tokenizers differ or it made none"""
    poison: bool = False
    """known to its author alone, and to the drill that counts"""
    peer: str = ""
    account: str = ""
    """what it is counted under: its peer, or all strangers together; its peer if empty"""
    round: int = 0
    index: int = 0
    """its place among the completions that its peer sent for the problem"""
    reward: float = 0.0
    """by this peer's own ground truth"""
    behaviour: Behaviour = ()
    """what it does, where peers vote on that"""
    penalty: float = 0.0
    """what its length costs of the reward, at most 0"""
    alike: bool = False
    """its generator says that it holds the very weights that its reader holds, and cuts texts into the same tokens"""
    claimed: float | None = None
    """the generator's claim about the whole text, where its tokens are others than ``ids``"""
    reading: Reading = field(default=UNREAD, compare=False)
    layer: str = ""
    """the layer of the defence that refused it; accepted if empty"""
    reason: str = ""
    passed: tuple[str, ...] = ()
    """layers that found nothing"""
    proven: bool = True
    """every layer that works here has found it good; what is not refused and not proven either is never rewarded"""
    advantage: float | None = None
    """None: nothing is learned from it"""

    @property
    def counted(self) -> str:
        """Under whose share of a round it comes."""
        return self.account or self.peer

    @property
    def worth(self) -> float:
        """By which it is compared with the others of its group."""
        return self.reward + self.penalty

    def given(self, reward: float | None) -> Rollout:
        """With what a vote gives it. Where there is no label, length costs nothing either: its group has no spread."""
        return replace(self, reward=0.0, penalty=0.0) if reward is None else replace(self, reward=reward)

    @property
    def name(self) -> tuple[str, int, int, int]:
        """What identifies it in records and explanations."""
        return self.peer, self.round, self.problem.number, self.index
