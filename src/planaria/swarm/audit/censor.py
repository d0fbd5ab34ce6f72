"""Censor of a service: withhold replies that may leak a protected answer at random, and charge them to a ledger.

A reply is empty with a probability ρ such that (1 - ρ) · ln(options) ≤ ε
(:func:`planaria.swarm.audit.leakage.silence_probability`). The choice does not depend on the reply, so an empty reply
leaks nothing. The ledger is charged (1 - ρ) · ln(options) before a reply is sent.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from planaria.common import atomic, digests, documents
from planaria.common.cache import hold_lock
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.swarm.audit.leakage import max_leakage, silence_probability
from planaria.swarm.audit.questions import Question, normalize_closed, refuse_duplicates

_COIN = random.SystemRandom().random


class BudgetSpent(Exception):
    """A budget would be exceeded; the message does not name the question."""


class LedgerUnusable(Exception):
    """The budget spent is unknown: the ledger is missing, damaged or not writable."""


class Censor:
    """Decides which replies are sent. Replies to texts without a listed question or part are always sent."""

    def __init__(
        self, questions: Sequence[Question], epsilon: float, ledger: LeakageLedger, coin: Callable[[], float] = _COIN
    ) -> None:
        """Protect ``questions`` with the budget of ``ledger``.

        :param epsilon: maximum expected leakage of a reply, nats
        :param coin: draws from [0, 1); must be secret, never seeded by a request
        :raises UserError: if ``epsilon`` is not above 0, or two questions are the same.
        """
        if not epsilon > 0:
            raise UserError(f"--censor {epsilon:g} must be above 0, in nats per reply")
        refuse_duplicates(questions)
        self._ledger, self._coin = ledger, coin
        self._protected = [
            (ledger_key(question), silence_probability(max_leakage(1 / len(question.options)), epsilon), question)
            for question in questions
        ]
        self._texts = [
            (normalize_closed(text), number) for number, (*_, one) in enumerate(self._protected) for text in one.texts
        ]

    def decide_replies(self, text: str, count: int) -> list[bool]:
        """Decide which of ``count`` replies to a text are sent; charge all of them if the text touches a question.

        :raises BudgetSpent: if a budget would be exceeded; no reply is sent.
        :raises LedgerUnusable: if the ledger cannot be used.
        """
        return self._charge_and_draw(self._matching_questions(text), count)

    def decide_completed(self, text: str, reply: str) -> bool:
        """Decide whether to send a reply that completes a listed text begun by its prompt, such as "digit 1 of Ann" and
        "a is 4". Errors as for :meth:`decide_replies`."""
        return self._charge_and_draw(
            [n for n in self._matching_questions(text + reply) if n not in self._matching_questions(text)], 1
        )[0]

    def _charge_and_draw(self, numbers: Sequence[int], count: int) -> list[bool]:
        if not numbers:
            return [True] * count
        silent = max(self._protected[number][1] for number in numbers)
        costs = {
            self._protected[n][0]: (1 - silent) * max_leakage(1 / len(self._protected[n][2].options)) * count
            for n in numbers
        }
        try:
            paid = self._ledger.spend(costs, count)
        except (UserError, OSError) as error:
            raise LedgerUnusable(str(error)) from error
        if not paid:
            raise BudgetSpent("the budget of the requested answer is spent")
        return [self._coin() >= silent for _ in range(count)]

    def _matching_questions(self, text: str) -> list[int]:
        closed = normalize_closed(text)
        return sorted({number for listed, number in self._texts if listed in closed})


def ledger_key(question: Question) -> str:
    """Return the ledger key of a question, independent of its position in a file.

    The normal form is part of the ledger's format and therefore frozen. Questions that differ for
    :func:`planaria.swarm.audit.questions.refuse_duplicates` have different keys.
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
    """Budget spent on each protected question, on disk; charged before a reply is sent, and never refunded.

    Processes with the same file share it under a lock, which the kernel releases when its holder exits.
    """

    def __init__(self, file: Path, budget: float) -> None:
        """Open the ledger in ``file``, or create it.

        :param budget: nats per question, for all users together
        :raises UserError: if the file is damaged or not writable.
        """
        self.budget, self._file = budget, file
        try:
            with hold_lock(self._lock, lambda: None):
                if file.exists():
                    self._read()
                else:
                    self._write(_Spent())
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error.strerror}); use another --ledger FILE") from error

    def spend(self, costs: Mapping[str, float], replies: int = 1) -> bool:
        """Charge ``replies`` replies before they are sent. If that would exceed a budget, charge
        nothing and return False.

        :raises UserError: if the file is missing or damaged.
        :raises OSError: if it cannot be written; its content is unchanged.
        """
        with hold_lock(self._lock, lambda: None):
            before = self._read()
            nats = {key: before.nats.get(key, 0.0) + cost for key, cost in costs.items()}
            if any(spent > self.budget + SLACK for spent in nats.values()):
                return False
            counts = {key: before.replies.get(key, 0) + replies for key in costs}
            self._write(_Spent(nats=before.nats | nats, replies=before.replies | counts))
            return True

    def spent_nats(self, key: str) -> float:
        """Return the nats spent on a question."""
        return self._read().nats.get(key, 0.0)

    @property
    def _lock(self) -> Path:
        return self._file.with_name(f".{self._file.name}.lock")

    def _read(self) -> _Spent:
        return documents.read_sealed(self._file, _Spent, MAX_LEDGER_BYTES, FIX)

    def _write(self, spent: _Spent) -> None:
        atomic.write_durable(self._file, documents.seal(spent).encode())
