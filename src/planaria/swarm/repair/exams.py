"""How a model is measured before and after a repair, on texts that no repair learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from planaria.swarm.config import SwarmConfig
from planaria.swarm.evaluation import Examiner
from planaria.swarm.policy.base import Policy
from planaria.swarm.records.measure import Tally
from planaria.swarm.repair.judged import Reviewer
from planaria.swarm.repair.results import Measured
from planaria.swarm.repair.texts import Pair, Text
from planaria.swarm.repair.training import nats
from planaria.swarm.tasks.base import Problem

MEASURED = 400
"""held-out problems"""
REJECTED = "rejected"


class Exam(Protocol):
    def measure(self, policy: Policy) -> Measured:
        """On what nothing was learned from or chosen by."""

    def fit(self, policy: Policy) -> tuple[float, ...]:
        """How good it is by what a repair may know; larger is better, the first number before the second."""


class TaskExam:
    """Draws on held-out problems, as evaluations of a swarm make them; repairs are chosen by the judge's word."""

    def __init__(self, config: SwarmConfig, reviewer: Reviewer, choosing: Sequence[Problem], watch: Sequence[str]):
        evaluate = config.evaluate.model_copy(update={"problems": MEASURED, "watch": list(watch)})
        own = config.model_copy(update={"evaluate": evaluate})
        self._examiner = Examiner(reviewer.task, own, "repair")
        self._reviewer, self._choosing = reviewer, choosing

    def measure(self, policy: Policy) -> Measured:
        found = self._examiner.examine(policy)
        return Measured(success=found.watch, accuracy=found.accuracy, sound=found.sound)

    def fit(self, policy: Policy) -> tuple[float, ...]:
        return (self._reviewer.share(policy, self._choosing),)


class TextExam:
    """Texts of files: which of a pair is likelier, and what benign texts cost."""

    def __init__(
        self, pairs: Sequence[Pair], benign: Sequence[Text], known: Sequence[Pair], trusted: Sequence[Text]
    ) -> None:
        """``known`` and ``trusted``: what was learned from, to choose among repairs by."""
        self._pairs, self._benign, self._known, self._trusted = pairs, benign, known, trusted

    def measure(self, policy: Policy) -> Measured:
        success: Mapping[str, Tally] = {REJECTED: _rejected(policy, self._pairs)} if self._pairs else {}
        return Measured(success=dict(success), nats=_mean(policy, self._benign) if self._benign else None)

    def fit(self, policy: Policy) -> tuple[float, ...]:
        found = _rejected(policy, self._known)
        return -(found.rate or 0.0), -_mean(policy, self._trusted)


def _rejected(policy: Policy, pairs: Sequence[Pair]) -> Tally:
    """How many rejected texts are at least as likely as the chosen ones beside them."""
    chosen, rejected = (nats(policy, [getattr(pair, kind) for pair in pairs]) for kind in ("chosen", "rejected"))
    return Tally(hits=sum(b <= a for a, b in zip(chosen, rejected, strict=True)), eligible=len(pairs))


def _mean(policy: Policy, texts: Sequence[Text]) -> float:
    """Nats a token."""
    return sum(nats(policy, texts)) / sum(len(text.ids) for text in texts)
