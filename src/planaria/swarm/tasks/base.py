"""Task interface: problems that every peer generates from a number and scores locally.

Only the problem's number is transmitted. A receiver regenerates the problem and scores the completion itself.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from planaria.config.registry import Choice, custom_choices
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import FORMS, AnswerMarks, Style, canonical, parse

Behaviour = tuple[str | None, ...]
"""observable results of a completion, equal where completions behave alike, or None where a part has no result"""


@dataclass(frozen=True)
class TaskProblem:
    """One problem; a number yields the same problem on every machine and with every seed."""

    number: int
    prompt: str
    answer: str
    """reference answer, or other data that ``score`` needs; never shown to a policy"""


class TaskReward(NamedTuple):
    """A task's score, clipped to the range a swarm accepts."""

    value: float
    """score from 0 to 1"""
    flaw: str = ""
    """why ``value`` differs from the task's score; empty if it does not"""


def as_reward(score: object) -> TaskReward:
    """Clip a finite number to 0..1; count NaN, infinity and non-numbers as 0.

    Advantages are relative to the group's deviation, so an unbounded reward would dominate its group.
    """
    number: Any = score if isinstance(score, Real) else math.nan
    if 0 <= number <= 1:
        return TaskReward(float(number))
    value = 1.0 if 1 < number != math.inf else 0.0
    shown = " ".join(reprlib.repr(score).split())[:120]
    return TaskReward(value, f"score returned {shown}, not a number from 0 to 1; it counts as {value:g}")


class Task(Choice, ABC):
    """Problems 0..``training`` - 1 are for training, the next ``held_out`` for evaluation only.

    The fields of a subclass are its options.
    """

    @property
    def name(self) -> str:
        """Return the task's name for messages."""
        return type(self).__name__

    @property
    def instruction(self) -> str:
        """Return the prompt text about the form of completions, or an empty string if there is none."""
        return ""

    @property
    @abstractmethod
    def training(self) -> int: ...

    @property
    @abstractmethod
    def held_out(self) -> int: ...

    @abstractmethod
    def problem(self, number: int) -> TaskProblem:
        """Return problem ``number``.

        :raises ValueError: if there is no such problem.
        """

    def check_number(self, number: int) -> None:
        """:raises ValueError: if there is no problem ``number``."""
        if not 0 <= number < self.training + self.held_out:
            raise ValueError(f"{self.name} has no problem {number}")

    def chooses(self, number: int) -> bool:
        """Return whether this peer prefers problem ``number`` where peers choose their own (vertical rounds)."""
        return True

    @abstractmethod
    def score(self, problem: TaskProblem, completion: str) -> float:
        """Return the verifiable reward of a completion, from 0 to 1 (correct). Must not raise for any text.

        :func:`as_reward` clips other values.
        """

    def solves(self, problem: TaskProblem, completion: str) -> bool:
        """Return whether a completion earns the full reward."""
        return as_reward(self.score(problem, completion)).value == 1

    def answer(self, completion: str) -> str | None:
        """Return a completion's answer in a canonical form, or None if it has none or the task cannot extract it."""
        return None

    def behaviour(self, problem: TaskProblem, completion: str, draw: int, untested: bool = False) -> Behaviour:
        """Return the observable results of a completion, for comparison with others; empty if there are none.

        By default the answer is the only part. The parts depend on ``draw``, a number unknown when completions were
        written. With ``untested``, return only parts on which scores do not depend.
        """
        answer = None if untested else self.answer(completion)
        return () if answer is None else (canonical(answer) or None,)

    @property
    def unlabelled(self) -> Set[int]:
        """Return the numbers of problems without a reference, which nothing can score."""
        return frozenset()

    @property
    def comparable(self) -> bool:
        """Return whether completions can be compared by behaviour."""
        return type(self).answer is not Task.answer

    @property
    def probing(self) -> bool:
        """Return whether behaviour includes parts on which scores do not depend."""
        return False

    def solution(self, problem: TaskProblem, rng: random.Random) -> str | None:
        """Return a worked solution that scores 1, in the form policies learn, or None if the task has none."""
        return None

    def noisy_solution(self, problem: TaskProblem, rng: random.Random, noise: float) -> str | None:
        """Return a worked solution in which each step is wrong with probability ``noise`` and later steps follow it.

        A task without typical mistakes returns :meth:`solution`.
        """
        return self.solution(problem, rng)

    def sound(self, problem: TaskProblem, completion: str) -> bool | None:
        """Return whether every step is true and nothing else is stated, or None if the task cannot check that."""
        return None

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that differ if options or data could change any problem or score."""
        return records.fingerprint(type(self).__qualname__, [self.model_dump_json()])

    @property
    def identity(self) -> str:
        """Return the fingerprint that peers must share; for classes outside planaria it covers their source."""
        modules = {chosen.__module__ for chosen in custom_choices([type(self)])}
        sources = [inspect.getsource(sys.modules[module]) for module in sorted(modules)]
        return records.fingerprint(self.fingerprint, sources) if sources else self.fingerprint


class BlockTask(Task, ABC):
    """A task whose answers stand in the answer block of a form. Subclasses have a field ``style``."""

    if TYPE_CHECKING:
        style: Style

    @property
    def form(self) -> AnswerMarks:
        return FORMS[self.style]

    @property
    def instruction(self) -> str:
        return self.form.instruction

    def answer(self, completion: str) -> str | None:
        """Return the stripped content of the answer block, or None if there is none."""
        parsed = parse(self.form, completion)
        return None if parsed is None else parsed.answer.strip()


class ErringTask(Task, ABC):
    """A task that writes solutions with typical mistakes; its worked solution is one without."""

    @abstractmethod
    def noisy_solution(self, problem: TaskProblem, rng: random.Random, noise: float) -> str:
        """Return a worked solution in which each step is wrong with probability ``noise``."""

    def solution(self, problem: TaskProblem, rng: random.Random) -> str:
        return self.noisy_solution(problem, rng, 0.0)
