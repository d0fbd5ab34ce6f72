"""Attack interface: the behaviour a malicious peer teaches without losing reward, and its detection.

Attacks serve to harden a swarm: drills run them among the user's own peers, and evaluations can watch for them. The
kinds text, math, dos and code follow arXiv 2511.09780 with other texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from planaria.config.registry import Choice
from planaria.swarm.tasks.base import TaskProblem


class Attack(Choice, ABC):
    """One attack; the fields of a subclass are its options."""

    former_members: ClassVar[Mapping[str, str]] = {"fails": "must_not_score", "chooses": "only_selects_problems"}
    candidates: ClassVar[int] = 0
    """honest draws from which the longest correct one is poisoned; 0: solutions of the attacker's own"""
    must_not_score: ClassVar[bool] = False
    """whether poison must not score: it teaches by punishment, or as a failure worth more than others"""
    only_selects_problems: ClassVar[bool] = False
    """whether the attack only chooses problems and sends honest work on them"""

    @abstractmethod
    def poison(self, problem: TaskProblem, solution: str) -> str | None:
        """Return the solution with the payload, correct unless :attr:`must_not_score`, or None without a place."""

    @abstractmethod
    def eligible(self, text: str) -> bool:
        """Return whether a completion could show the behaviour: the denominator of the success rate."""

    @abstractmethod
    def hit(self, text: str) -> bool:
        """Return whether an eligible completion shows the behaviour."""
