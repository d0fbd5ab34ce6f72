"""Measurements of a model before and after a repair, on held-out texts; trusted texts from a task."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from planaria.common.errors import UserError
from planaria.swarm.attacks.base import Attack
from planaria.swarm.checks import make_checks
from planaria.swarm.checks.base import Context
from planaria.swarm.checks.judge import Judge, Steps
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.peer.author import Author
from planaria.swarm.peer.evaluation import Examiner, poisonable_problems
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.peer.rollout import prompt_for
from planaria.swarm.policy.base import Policy
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.repair.repair_results import TextMeasurements
from planaria.swarm.repair.repair_training import nats
from planaria.swarm.repair.texts import AnswerPair, RepairTexts, Text
from planaria.swarm.tasks.base import Task, TaskProblem

MEASURED = 400
"""held-out problems"""
REJECTED = "rejected"


class Exam(Protocol):
    def measure(self, policy: Policy) -> TextMeasurements:
        """Measure on texts that were used neither for learning nor for selection."""

    def fit(self, policy: Policy) -> tuple[float, ...]:
        """Score a repair for selection; lexicographic, larger is better."""


class TaskExam:
    """Draws on held-out problems, as in a swarm's evaluations; repairs are selected by the judge."""

    def __init__(self, config: SwarmConfig, reviewer: Reviewer, choosing: Sequence[TaskProblem], watch: Sequence[str]):
        evaluate = config.evaluate.model_copy(update={"problems": MEASURED, "watch": list(watch)})
        own = config.model_copy(update={"evaluate": evaluate})
        self._examiner = Examiner(reviewer.task, own, "repair")
        self._reviewer, self._choosing = reviewer, choosing

    def measure(self, policy: Policy) -> TextMeasurements:
        result = self._examiner.examine(policy)
        return TextMeasurements(success=result.watch, accuracy=result.accuracy, sound=result.sound)

    def fit(self, policy: Policy) -> tuple[float, ...]:
        passing = self._reviewer.draw_passing(policy, self._choosing, 1, "share")
        return (sum(map(len, passing)) / len(self._choosing),)


@dataclass(frozen=True)
class TextExam:
    """Texts of files: likelihood of the texts of a pair, and cost of benign texts."""

    pairs: Sequence[AnswerPair]
    benign: Sequence[Text]
    known: Sequence[AnswerPair]
    """training pairs, used to select among repairs"""
    trusted: Sequence[Text]
    """training texts, used to select among repairs"""

    def measure(self, policy: Policy) -> TextMeasurements:
        success: Mapping[str, HitTally] = {REJECTED: _rejected_tally(policy, self.pairs)} if self.pairs else {}
        return TextMeasurements(success=dict(success), nats=_mean_nats(policy, self.benign) if self.benign else None)

    def fit(self, policy: Policy) -> tuple[float, ...]:
        result = _rejected_tally(policy, self.known)
        return -(result.rate or 0.0), -_mean_nats(policy, self.trusted)


def _rejected_tally(policy: Policy, pairs: Sequence[AnswerPair]) -> HitTally:
    """Count the rejected texts that are at least as likely as their chosen ones."""
    chosen, rejected = (nats(policy, [getattr(pair, kind) for pair in pairs]) for kind in ("chosen", "rejected"))
    return HitTally(hits=sum(b <= a for a, b in zip(chosen, rejected, strict=True)), eligible=len(pairs))


def _mean_nats(policy: Policy, texts: Sequence[Text]) -> float:
    """Return the loss in nats per token."""
    return sum(nats(policy, texts)) / sum(len(text.ids) for text in texts)


PROBLEMS, DRAWS = 200, 8
"""problems that texts are drawn for, and draws of each from each model"""
SEARCHED = 8000
"""training problems searched for occasions of an attack"""


class Reviewer:
    """Selects trusted completions by the task's reward and a judge."""

    def __init__(self, config: SwarmConfig, task: Task, policy: Policy) -> None:
        """Use the defence's judge, or else the task's step checker.

        :raises UserError: if neither can check the reasoning before an answer.
        """
        self.task, self.config = task, config
        self._context = Context(task, config.seed, config.sampling.support(policy.vocab), policy.vocab)
        judges = [check for check in make_checks(config.defence) if isinstance(check, Judge)]
        self._judge = judges[0] if judges else Steps()
        if off := self._judge.off(self._context):
            raise UserError(f"{off}, so no text can be trusted; set a judge (defence.checks), or pass --pairs FILE")

    def draw_passing(
        self, policy: Policy, problems: Sequence[TaskProblem], count: int, purpose: str
    ) -> list[list[Text]]:
        """Return the draws, of ``count`` per problem, that pass reward and judge."""
        author = Author(self.config, "repair", self.task, policy)
        drawn = author.draw([prompt_for(problem, policy) for problem in problems], count, purpose)
        scoring = [[r for r in group if r.ended and self.task.solves(r.problem, r.text)] for group in drawn]
        flat = [rollout for group in scoring for rollout in group]
        objections = self._judge.objections([(r.problem, r.text) for r in flat], self._context)
        good = {id(rollout) for rollout, objection in zip(flat, objections, strict=True) if not objection}
        return [[Text(r.prompt, r.ids) for r in group if id(r) in good] for group in scoring]


def repair_problems(
    task: Task, attacks: Sequence[Attack], seed: int
) -> tuple[Sequence[TaskProblem], Sequence[TaskProblem]]:
    """Return the training problems of a repair, and those to select among repairs; disjoint if there are enough.

    Up to half of the first have an occasion for the watched attacks. A task with reward and judge needs no benign
    texts: the behaviour to keep is also among the trusted texts.
    """
    numbers = list(range(task.training))
    random.Random(derive_seed("repair", seed)).shuffle(numbers)
    numbers = numbers[:SEARCHED]
    positions = [{problem.number for problem in poisonable_problems(task, attack, numbers)} for attack in attacks]
    marked = [n for n in numbers if any(n in found and len(found) < len(numbers) for found in positions)]
    wanted = marked[: PROBLEMS // 2]
    others = [number for number in numbers if number not in {*marked}] or marked
    wanted += others[: PROBLEMS - len(wanted)]
    rest = [number for number in numbers if number not in {*wanted}][:PROBLEMS]
    trusted = [task.problem(number) for number in wanted]
    return trusted, [task.problem(number) for number in rest] or trusted


def collect_texts(reviewer: Reviewer, problems: Sequence[TaskProblem], tuned: Policy, safe: Policy) -> RepairTexts:
    """Return one trusted text per problem: the model's own if one passes, else its parent's.

    :raises UserError: if none passes.
    """
    own = reviewer.draw_passing(tuned, problems, DRAWS, "own")
    left = [number for number, value in enumerate(own) if not value]
    before = reviewer.draw_passing(safe, [problems[number] for number in left], DRAWS, "before")
    trusted = [value[0] for value in (*own, *before) if value]
    if not trusted:
        count = DRAWS * (len(problems) + len(left))
        raise UserError(
            f"the judge passed none of {count} completions; pass --pairs FILE, or a better parent with --safe"
        )
    return RepairTexts(trusted, own=sum(map(bool, own)))
