"""Trusted texts from a task: completions that its reward and a judge pass, drawn from the model or from its parent."""

from __future__ import annotations

import random
from collections.abc import Sequence

from planaria.common.errors import UserError
from planaria.swarm.attacks.base import Attack
from planaria.swarm.authors import HonestAuthor
from planaria.swarm.checks import checks
from planaria.swarm.checks.base import Context
from planaria.swarm.checks.judge import Judge, Steps
from planaria.swarm.config import SwarmConfig
from planaria.swarm.draws import derived
from planaria.swarm.evaluation import with_place
from planaria.swarm.policy.base import Policy
from planaria.swarm.repair.texts import Text, Texts
from planaria.swarm.rollout import Rollout, ask
from planaria.swarm.tasks.base import Problem, Task

PROBLEMS, DRAWS = 200, 8
"""problems that texts are drawn for, and draws of each from each model"""
SEARCHED = 8000
"""training problems that are looked through for places of an attack"""


class Reviewer:
    """Who vouches for a completion: the task's reward, and a judge."""

    def __init__(self, config: SwarmConfig, task: Task, policy: Policy) -> None:
        """The judge is the defence's own; the task's checker of steps if it has none.

        :raises UserError: when nobody can read what stands before a right answer.
        """
        self.task, self.config = task, config
        self._context = Context(task, config.seed, config.sampling.support(policy.vocab), policy.vocab)
        judges = [check for check in checks(config.defence) if isinstance(check, Judge)]
        self._judge = judges[0] if judges else Steps()
        if off := self._judge.off(self._context):
            raise UserError(f"{off}, so no text can be trusted: set a judge (defence.checks), or give --pairs FILE")

    def passes(self, policy: Policy, problems: Sequence[Problem], count: int, purpose: str) -> list[list[Text]]:
        """Of ``count`` draws for every problem, those that reward and judge pass."""
        author = HonestAuthor(self.config, "repair", self.task, policy)
        drawn = author.draw([ask(problem, policy) for problem in problems], count, purpose)
        scoring = [[r for r in group if r.ended and self.task.solves(r.problem, r.text)] for group in drawn]
        flat = [rollout for group in scoring for rollout in group]
        said = self._judge.objections([(r.problem, r.text) for r in flat], self._context)
        good = {id(rollout) for rollout, objection in zip(flat, said, strict=True) if not objection}
        return [[_text(rollout) for rollout in group if id(rollout) in good] for group in scoring]

    def share(self, policy: Policy, problems: Sequence[Problem]) -> float:
        """The share of single draws that pass."""
        return sum(map(len, self.passes(policy, problems, 1, "share"))) / len(problems)


class Asking:
    """Which training problems a repair asks about: up to half of them where the watched attacks can show.

    A task whose reward and judge can be asked of every problem needs no benign texts: what is to stay is trusted too.
    """

    def __init__(self, task: Task, attacks: Sequence[Attack], seed: int) -> None:
        numbers = list(range(task.training))
        random.Random(derived("repair", seed)).shuffle(numbers)
        numbers = numbers[:SEARCHED]
        places = [{problem.number for problem in with_place(task, attack, numbers)} for attack in attacks]
        marked = [n for n in numbers if any(n in found and len(found) < len(numbers) for found in places)]
        wanted = marked[: PROBLEMS // 2]
        others = [number for number in numbers if number not in {*marked}] or marked
        wanted += others[: PROBLEMS - len(wanted)]
        self.trusted = [task.problem(number) for number in wanted]
        rest = [number for number in numbers if number not in {*wanted}][:PROBLEMS]
        self.choosing = [task.problem(number) for number in rest] or self.trusted
        """to choose among repairs by: nothing is learned from them, where there are enough"""


def texts_of(reviewer: Reviewer, asking: Asking, tuned: Policy, safe: Policy) -> Texts:
    """One trusted text a problem: the model's own where one passes, else its parent's.

    :raises UserError: when none passes.
    """
    problems = asking.trusted
    own = reviewer.passes(tuned, problems, DRAWS, "own")
    left = [number for number, found in enumerate(own) if not found]
    before = reviewer.passes(safe, [problems[number] for number in left], DRAWS, "before")
    trusted = [found[0] for found in (*own, *before) if found]
    if not trusted:
        count = DRAWS * (len(problems) + len(left))
        raise UserError(f"the judge passed none of {count} completions: give --pairs FILE, or a better parent (--safe)")
    return Texts(trusted, own=sum(map(bool, own)))


def _text(rollout: Rollout) -> Text:
    return Text(rollout.prompt, rollout.ids)
