"""What a swarm learns: problems that every peer can make from their number and check by itself.

A problem's number is all that travels. Whoever receives a completion makes the problem again, answer and all, and
scores the text: no peer's word on truth or reward is ever taken.
"""

from __future__ import annotations

import inspect
import math
import random
import reprlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

from planaria.config.registry import Choice, foreign
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import canonical

Behaviour = tuple[str | None, ...]
"""What a completion does, part by part, as texts that are equal where it does the same; None where it does nothing"""


@dataclass(frozen=True)
class Problem:
    """One problem; the same number gives the same problem on every machine, with every seed."""

    number: int
    prompt: str
    answer: str
    """the reference answer, or what else ``score`` needs; never shown to a policy"""


class Reward(NamedTuple):
    """A task's score as a swarm counts it."""

    value: float
    """from 0 to 1"""
    flaw: str = ""
    """why it is not what the task returned, for a message; empty if it is"""


def as_reward(score: object) -> Reward:
    """Clip a finite number to 0..1; count NaN, infinity and anything that is not a number as 0.

    A group whose rewards have no fixed range is dominated by the largest: advantages are relative to its deviation.
    """
    number: Any = score if isinstance(score, Real) else math.nan
    if 0 <= number <= 1:
        return Reward(float(number))
    value = 1.0 if 1 < number != math.inf else 0.0
    shown = " ".join(reprlib.repr(score).split())
    return Reward(value, f"score returned {shown}, not a number from 0 to 1; it counts as {value:g}")


class Task(Choice, ABC):
    """Problems 0..``training`` - 1 are for training, ``training``..``training + held_out`` - 1 for evaluation only.

    The fields of a subclass are its options.
    """

    @property
    def name(self) -> str:
        """For people and their errors."""
        return type(self).__name__

    @property
    def instruction(self) -> str:
        """What to tell a model that follows instructions of the form that a completion must have; empty: nothing."""
        return ""

    @property
    @abstractmethod
    def training(self) -> int: ...

    @property
    @abstractmethod
    def held_out(self) -> int: ...

    @abstractmethod
    def problem(self, number: int) -> Problem:
        """:raises ValueError: when there is no such problem."""

    @abstractmethod
    def score(self, problem: Problem, completion: str) -> float:
        """Return the verifiable reward of a completion, from 0 (worth nothing) to 1 (right). Must not raise, whatever
        the text. Anything else is counted as :func:`as_reward` says."""

    def solves(self, problem: Problem, completion: str) -> bool:
        """Whether a completion is right, not just worth something."""
        return as_reward(self.score(problem, completion)).value == 1

    def answer(self, completion: str) -> str | None:
        """The answer that a completion gives, in one canonical form; None if it gives none, or nobody can tell."""
        return None

    def behaviour(self, problem: Problem, completion: str, draw: int, untested: bool = False) -> Behaviour:
        """What a completion does, to be compared with what others for the same problem do; empty if it does nothing.

        Here its answer, in one part. Where there are several, they are the same for all completions with the same
        ``draw``, a number that nobody knew when they were written. ``untested``: only what scores do not depend on.
        """
        answer = None if untested else self.answer(completion)
        return () if answer is None else (canonical(answer) or None,)

    @property
    def unlabelled(self) -> Set[int]:
        """The problems for which nobody knows what is right: nothing scores there."""
        return frozenset()

    @property
    def comparable(self) -> bool:
        """Whether completions can be compared by what they do."""
        return type(self).answer is not Task.answer

    @property
    def probing(self) -> bool:
        """Whether they do anything that scores do not depend on."""
        return False

    def solution(self, problem: Problem, rng: random.Random) -> str | None:
        """A worked solution that scores 1, in the form that policies are to learn; None if the task knows none."""
        return None

    def sound(self, problem: Problem, completion: str) -> bool | None:
        """Whether every step of the reasoning is true and nothing else is said; None if the task cannot tell."""
        return None

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ whenever any problem or any score could differ by other options or data."""
        return records.fingerprint(type(self).__qualname__, [self.model_dump_json()])

    @property
    def identity(self) -> str:
        """The fingerprint, of a class from outside planaria together with its source: what peers must share."""
        modules = {chosen.__module__ for chosen in foreign([type(self)])}
        sources = [inspect.getsource(sys.modules[module]) for module in sorted(modules)]
        return records.fingerprint(self.fingerprint, sources) if sources else self.fingerprint


@runtime_checkable
class Erring(Protocol):
    """A task that can also write solutions with mistakes in them, as they occur."""

    def noisy_solution(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """A worked solution in which each step is wrong with probability ``noise``, and the rest follows from it."""
