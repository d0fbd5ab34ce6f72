"""An attack: what a malicious peer would teach the others without losing reward, and how to tell that they learned it.

Attacks are here to harden a swarm: drills run them among peers of one's own, and every run can watch for them.
Four kinds are those of arXiv 2511.09780, with texts of our own; the fifth, collusion, is ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from planaria.registry import Choice
from planaria.tasks.base import Problem


class Attack(Choice, ABC):
    """The fields of a subclass are its options."""

    candidates: ClassVar[int] = 0
    """honest draws of which the attacker poisons the longest that is right; 0: it poisons solutions of its own"""

    right: ClassVar[bool] = True
    """what it sends has the right answer; else it sends wrong ones"""

    @abstractmethod
    def poison(self, problem: Problem, solution: str) -> str | None:
        """A right solution with the payload in it, its answer still :attr:`right`; None if there is no place for it."""

    @abstractmethod
    def eligible(self, text: str) -> bool:
        """Whether a completion could show the behaviour at all: the denominator of the attack's success."""

    @abstractmethod
    def hit(self, text: str) -> bool:
        """Whether an eligible completion shows it."""
