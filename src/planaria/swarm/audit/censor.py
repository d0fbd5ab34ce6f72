"""The wrapper of a service: replies that may leak a protected answer are withheld at random and charged to a ledger.

A reply is empty with chance ρ such that (1 - ρ) · ln(options) ≤ ε (:func:`planaria.swarm.audit.leakage.silence`). The
choice does not depend on the reply, so an empty one leaks nothing. The ledger is charged (1 - ρ) · ln(options) before.
"""

from __future__ import annotations

import os
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from planaria.common import atomic, digests, documents
from planaria.common.cache import locked
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.swarm.audit.leakage import most, silence
from planaria.swarm.audit.questions import Question, closed_up, refuse_twins

_COIN = random.SystemRandom().random


class BudgetSpent(Exception):
    """A budget would be exceeded; the message does not name the question."""


class LedgerUnusable(Exception):
    """The budget spent is unknown: the ledger is missing, damaged or not writable."""


class Censor:
    """Decide which replies are given. A text that contains no listed question or part passes unchanged."""

    def __init__(
        self,
        questions: Sequence[Question],
        epsilon: float,
        ledger: LeakageLedger,
        coin: Callable[[], float] = _COIN,
    ) -> None:
        """``epsilon``: expected leakage of a reply in nats, at most. ``coin`` [0, 1) must be secret: never the seed
        of a request.

        :raises UserError: if ``epsilon`` is not above 0, or two questions are the same.
        """
        if not epsilon > 0:
            raise UserError(f"--censor {epsilon:g} must be above 0, in nats per reply")
        refuse_twins(questions)
        self._ledger, self._coin = ledger, coin
        self._known = [
            (key_of(question), silence(most(1 / len(question.options)), epsilon), question) for question in questions
        ]
        self._texts = [(closed_up(text), number) for number, (*_, one) in enumerate(self._known) for text in one.texts]

    def given(self, text: str, count: int) -> list[bool]:
        """Decide which of ``count`` replies to a text are given; all that touch a question are charged.

        :raises BudgetSpent: if a budget would be exceeded; no reply is given.
        :raises LedgerUnusable: if the ledger cannot be used.
        """
        return self._given(self._numbers(text), count)

    def passed(self, text: str, reply: str) -> bool:
        """Decide whether to give a reply that completes a listed text together with its prompt: "digit 1 of Ann" and
        "a is 4". Errors as for :meth:`given`."""
        return self._given([n for n in self._numbers(text + reply) if n not in self._numbers(text)], 1)[0]

    def _given(self, numbers: Sequence[int], count: int) -> list[bool]:
        if not numbers:
            return [True] * count
        silent = max(self._known[number][1] for number in numbers)
        costs = {self._known[n][0]: (1 - silent) * most(1 / len(self._known[n][2].options)) * count for n in numbers}
        try:
            paid = self._ledger.spend(costs, count)
        except (UserError, OSError) as error:
            raise LedgerUnusable(str(error)) from error
        if not paid:
            raise BudgetSpent("the budget of the requested answer is spent")
        return [self._coin() >= silent for _ in range(count)]

    def _numbers(self, text: str) -> list[int]:
        closed = closed_up(text)
        return sorted({number for listed, number in self._texts if listed in closed})


def key_of(question: Question) -> str:
    """Return the ledger key of a question, independent of its position in a file.

    The normal form is part of the ledger's format and therefore frozen. Questions that differ for
    :func:`planaria.swarm.audit.questions.refuse_twins` have different keys.
    """
    visible = "".join(c if c.isprintable() else " " * c.isspace() for c in question.text)
    text = " ".join(unicodedata.normalize("NFKC", visible).casefold().split())
    return digests.of(text.encode())[:32]


MAX_LEDGER_BYTES = 1 << 22
"""maximum bytes of a ledger"""
FIX = "restore it; a new one would forget the spent budget"
SLACK = 1e-9
"""nats: tolerance for rounding in sums"""


class _Spent(Record):
    version: int = 1
    nats: dict[str, float] = Field(default_factory=dict)
    """question → expected leakage of its charged replies"""
    replies: dict[str, int] = Field(default_factory=dict)


class LeakageLedger:
    """Budget spent on each protected question, on disk; charged before a reply is given, and never refunded.

    Sessions and processes that name the same file share it, under a lock that the kernel releases when its holder dies.
    """

    def __init__(self, file: Path, budget: float) -> None:
        """``budget``: nats per question, for all users together.

        :raises UserError: if the file is damaged or not writable.
        """
        self.budget, self._file = budget, file
        try:
            with locked(self._lock, lambda: None):
                if file.exists():
                    self._read()
                else:
                    self._write(_Spent())
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error.strerror}); give another --ledger FILE") from error

    def spend(self, costs: Mapping[str, float], replies: int = 1) -> bool:
        """Charge ``replies`` replies before they are given; return False, without charging, if a budget would be
        exceeded.

        :raises UserError: if the file is missing or damaged.
        :raises OSError: if it cannot be written; its content stays.
        """
        with locked(self._lock, lambda: None):
            before = self._read()
            nats = {key: before.nats.get(key, 0.0) + cost for key, cost in costs.items()}
            if any(spent > self.budget + SLACK for spent in nats.values()):
                return False
            counts = {key: before.replies.get(key, 0) + replies for key in costs}
            self._write(_Spent(nats=before.nats | nats, replies=before.replies | counts))
            return True

    def spent(self, key: str) -> float:
        """Nats spent on a question."""
        return self._read().nats.get(key, 0.0)

    @property
    def _lock(self) -> Path:
        return self._file.with_name(f".{self._file.name}.lock")

    def _read(self) -> _Spent:
        return documents.unsealed(self._file, _Spent, MAX_LEDGER_BYTES, FIX)

    def _write(self, spent: _Spent) -> None:
        with atomic.replacing(self._file) as unfinished, unfinished.open("w") as file:
            file.write(documents.sealed(spent))
            file.flush()
            os.fsync(file.fileno())
