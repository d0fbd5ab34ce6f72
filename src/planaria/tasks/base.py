"""What a swarm learns: problems that every peer can make from their number and check by itself.

A problem's number is all that travels. Whoever receives a completion makes the problem again, answer and all, and
scores the text: no peer's word on truth or reward is ever taken.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Problem:
    """One problem; the same number gives the same problem on every machine, with every seed."""

    number: int
    prompt: str
    answer: str
    """the reference answer, or what else ``score`` needs; never shown to a policy"""


class Task(Protocol):
    """Problems 0..``training`` - 1 are for training, ``training``..``training + held_out`` - 1 for evaluation only."""

    name: str
    training: int
    held_out: int

    def problem(self, number: int) -> Problem:
        """:raises ValueError: when there is no such problem."""

    def score(self, problem: Problem, completion: str) -> float:
        """The verifiable reward of a completion, 0 or 1. Any text at all may come: it never raises."""

    def answer(self, completion: str) -> str | None:
        """The answer that a completion gives, in one canonical form; None if it gives none."""

    def solution(self, problem: Problem, rng: random.Random) -> str | None:
        """A worked solution that scores 1, in the form that policies are to learn; None if the task knows none."""

    def sound(self, problem: Problem, completion: str) -> bool | None:
        """Whether every step of the reasoning is true and nothing else is said; None if the task cannot tell."""

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ whenever any problem or any score could differ."""


@runtime_checkable
class Erring(Protocol):
    """A task that can also write solutions with mistakes in them, as they occur."""

    def noisy_solution(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """A worked solution in which each step is wrong with probability ``noise``, and the rest follows from it."""
