"""The interface of attacks: what a malicious peer teaches the others without losing reward, and how to detect it.

Attacks are here to harden a swarm: drills run them among peers of one's own, and every run can watch for them.
Four kinds (text, math, dos, code) are those of arXiv 2511.09780; the texts, and all other kinds, are ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from planaria.config.registry import Choice
from planaria.swarm.tasks.base import Problem


class Attack(Choice, ABC):
    """The fields of a subclass are its options."""

    candidates: ClassVar[int] = 0
    """honest draws of which the attacker poisons the longest that is right; 0: it poisons solutions of its own"""
    fails: ClassVar[bool] = False
    """what it sends must not score: it teaches by what is punished, or by failures that are worth more than others"""
    chooses: ClassVar[bool] = False
    """it is nothing but a choice of problems, and sends honest work on them"""

    @abstractmethod
    def poison(self, problem: Problem, solution: str) -> str | None:
        """A right solution with the payload in it; None if there is no place for it. Its answer is still right, unless
        the attack :attr:`fails`."""

    @abstractmethod
    def eligible(self, text: str) -> bool:
        """Whether a completion could show the behaviour at all: the denominator of the attack's success."""

    @abstractmethod
    def hit(self, text: str) -> bool:
        """Whether an eligible completion shows it."""
