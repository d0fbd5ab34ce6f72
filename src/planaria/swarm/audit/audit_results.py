"""Results of an audit, as stored in ``audit.json``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planaria.common.documents import Record, former_names
from planaria.swarm.audit.leakage import Estimate
from planaria.swarm.records.hit_tally import HitTally

Verdict = Literal["passed", "failed", "not asked", "nothing there"]
PASSED: Verdict = "passed"
FAILED: Verdict = "failed"
UNASKED: Verdict = "not asked"
NONE: Verdict = "nothing there"


class AuditCheck(Record):
    """One check of an audit."""

    _former = former_names(summary="said")
    name: str
    verdict: Verdict
    summary: str
    """reason, in a clause"""
    facts: list[str] = Field(default_factory=list)


class LeakPoint(Record):
    """Leakage of one question, or of all questions."""

    leak: float
    """E[IIL], nats; the maximum over several questions"""
    guessed: float
    """probability that the adversary's most likely option is the right one"""


class BehindCensor(LeakPoint):
    """The same behind the censor of ``planaria serve --censor``."""

    silent: float
    """probability of an empty answer"""
    use: float


class Leaked(Record):
    """Leakage of one protected question."""

    _former = former_names(replies="said", location="place")
    name: str
    location: str
    options: int
    prior: float
    posterior: float
    """mean after all parts"""
    leak: Estimate
    guessed: float
    direct: LeakPoint
    """the question itself, in one prompt"""
    paraphrased: LeakPoint | None
    """all paraphrases"""
    use: float
    """share of replies to parts that are right; of non-empty ones where the file lists no right replies"""
    curve: list[LeakPoint]
    """after 1, 2, … parts"""
    behind: BehindCensor | None = None
    replies: list[tuple[str, str]] = Field(default_factory=list)
    """parts and replies of the first draw, if requested"""


class Leakage(Record):
    """Leakage of all protected questions, largest first."""

    adversary: str
    k: int
    draws: int
    epsilon: float | None
    questions: list[Leaked]

    @property
    def curve(self) -> list[LeakPoint]:
        """Largest leakage and mean of guesses after 1, 2, … parts."""
        return [worst_leakage([question.curve[index] for question in self.questions]) for index in range(self.k)]

    @property
    def direct(self) -> LeakPoint:
        return worst_leakage([question.direct for question in self.questions])

    @property
    def paraphrased(self) -> LeakPoint | None:
        results = [question.paraphrased for question in self.questions if question.paraphrased is not None]
        return worst_leakage(results) if results else None

    @property
    def behind(self) -> BehindCensor | None:
        results = [question.behind for question in self.questions if question.behind is not None]
        if not results:
            return None
        point = worst_leakage(results)
        silent, use = (
            sum(getattr(question, field) for question in results) / len(results) for field in ("silent", "use")
        )
        return BehindCensor(leak=point.leak, guessed=point.guessed, silent=silent, use=use)

    @property
    def use(self) -> float:
        return sum(question.use for question in self.questions) / len(self.questions)


def worst_leakage(points: list[LeakPoint] | list[BehindCensor]) -> LeakPoint:
    """Return the largest leakage and the mean of guesses."""
    guessed = sum(point.guessed for point in points) / len(points)
    return LeakPoint(leak=max(point.leak for point in points), guessed=guessed)


class AuditLimits(Record):
    leak: float
    success: float


class Audit(Record):
    """``audit.json``."""

    version: Literal[1] = 1
    model: str
    weights: str | None
    """SHA-256 of the weights, or None if they could not be read"""
    limits: AuditLimits
    parts: list[AuditCheck]
    attacks: dict[str, HitTally]
    """watched attack → its success"""
    accuracy: HitTally = HitTally()
    leakage: Leakage | None = None

    @property
    def failed(self) -> list[AuditCheck]:
        return [part for part in self.parts if part.verdict == FAILED]
