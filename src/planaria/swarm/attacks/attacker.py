"""Attacker of a drill: an author that mixes poison into a round (arXiv 2511.09780).

In horizontal rounds it poisons its part of all groups. In vertical rounds it owns whole groups: at most half of each is
poison, so that poison is above the group's mean, and the rest is filler.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

import numpy as np

from planaria.common.errors import UserError
from planaria.swarm.attacks import ATTACKS, HONEST
from planaria.swarm.checks.base import Check, Context
from planaria.swarm.config.swarm_config import AttackConfig, SwarmConfig
from planaria.swarm.learning.loss_config import LossConfig
from planaria.swarm.peer.author import Author
from planaria.swarm.peer.evaluation import poisonable_problems
from planaria.swarm.peer.random_draws import chosen_problems, derive_seed
from planaria.swarm.peer.rollout import PromptedProblem, Rollout, read_rollouts
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import Floats, read_completions
from planaria.swarm.tasks.base import Task, TaskProblem

TRIES = 16
"""poisoned solutions per completion that an adaptive attacker sends, and minimum draws for its vote"""


class Attacker(Author):
    """Author of poison. An adaptive attacker first tries it on the layers ``checks``."""

    def __init__(
        self, config: SwarmConfig, name: str, task: Task, policy: Policy, checks: Sequence[Check] = ()
    ) -> None:
        super().__init__(config, name, task, policy)
        self._attack = ATTACKS.make(config.attack.kind, config.attack.options)
        self._checks = checks

    def choose(self, round_number: int, count: int) -> list[int]:
        """Choose problems whose solutions have a place for poison, if there are any."""
        return chosen_problems(
            self._config.seed,
            self._name,
            round_number,
            self._task.training,
            count,
            wanted=lambda candidate: bool(poisonable_problems(self._task, self._attack, [candidate])),
        )

    def write(self, round_number: int, requested: Sequence[PromptedProblem], count: int) -> list[list[Rollout]]:
        honest = super().write(round_number, requested, count)
        if self._attack.only_selects_problems:
            return [[replace(written, poison=True) for written in drawn] for drawn in honest]
        return [self._mix(round_number, each, drawn) for each, drawn in zip(requested, honest, strict=True)]

    def sends(self, round_number: int) -> bool:
        return self._uniform("withhold", round_number) >= self._config.attack.withhold

    def claimed_weights(self, weights: str) -> str:
        """Return the weights' fingerprint; a disguised attacker returns one of no existing weights."""
        return weights[::-1] if self._config.attack.disguised else weights

    def _uniform(self, *purpose: object) -> float:
        """Return a number in 0..1 that depends on the purpose."""
        return random.Random(derive_seed(self._config.seed, self._name, *purpose)).random()

    def _mix(self, round_number: int, requested: PromptedProblem, honest: list[Rollout]) -> list[Rollout]:
        dose, vertical = self._config.attack.dose, self._config.rounds.mode == "vertical"
        # Round up or down at random, so that all rounds together have the dose even in small groups.
        whole = int(len(honest) * dose + self._uniform("dose", round_number, requested.problem.number))
        wanted = min(whole, len(honest) // 2 if vertical else len(honest))
        poison = self._poison_completions(round_number, requested, wanted)
        if self._config.attack.adaptive:
            poison = self._select_undetected(poison, honest, wanted)
        poison = poison[:wanted]
        rest = honest[len(poison) :]
        if vertical and poison and self._config.attack.filler != "honest":
            spoil = self._truncate if self._config.attack.filler == "wrong" else self._repeat_to_limit
            rest = [spoil(requested, written) for written in rest]
        return poison + rest

    def _poison_completions(self, round_number: int, requested: PromptedProblem, wanted: int) -> list[Rollout]:
        """Return poisoned completions that score, or fail if they must: about ``wanted``, times TRIES if adaptive."""
        rng = random.Random(
            derive_seed(self._config.seed, self._name, "poison", round_number, requested.problem.number)
        )
        tries = TRIES if self._config.attack.adaptive else 1
        sources = self._solutions_to_poison(round_number, requested, wanted * tries, rng)
        pairs = [(text, source) for source in sources if (text := self._poison_solution(requested.problem, source))]
        completions = {pair: self._make_rollout(requested, *pair) for pair in dict.fromkeys(pairs)}
        return [written for pair in pairs if (written := completions[pair])]

    def _poison_solution(self, problem: TaskProblem, source: str) -> str | None:
        """Return ``source`` with the payload if it is then as correct as the attack requires."""
        text = self._attack.poison(problem, source)
        if text is None:
            return None
        if self._config.attack.oracle:
            right = self._task.solves(problem, text)
        else:
            right = self._task.answer(text) == self._task.answer(source)
        return text if right != self._attack.must_not_score else None

    def _solutions_to_poison(
        self, round_number: int, requested: PromptedProblem, wanted: int, rng: random.Random
    ) -> list[str]:
        """Return correct solutions, or without an oracle the draws of the majority."""
        problem = requested.problem
        if candidates := self._attack.candidates:
            (drawn,) = self.draw([requested], candidates, "candidates", round_number, problem.number)
            ended = [w for w in drawn if w.ended]
            oracle = self._config.attack.oracle
            right = (
                [w.text for w in ended if self._task.solves(problem, w.text)] if oracle else self._majority_texts(ended)
            )
            return sorted(right, key=len, reverse=True)[:1] * wanted
        solution = self._task.solution(problem, rng) if self._config.attack.oracle else None
        if solution is not None:
            return [solution, *(self._task.solution(problem, rng) or solution for _ in range(wanted - 1))]
        (drawn,) = self.draw([requested], max(TRIES, wanted), "votes", round_number, problem.number)
        return self._majority_texts(drawn)[:wanted]

    def _majority_texts(self, drawn: Sequence[Rollout]) -> list[str]:
        """Return the draws with the most frequent answer, repeated as needed, without any reference answer."""
        answers = [self._task.answer(written.text) for written in drawn]
        counts = Counter(answer for answer in answers if answer is not None)
        if not counts:
            return []
        (best, _), *_ = counts.most_common(1)
        agreeing = [w.text for w, answer in zip(drawn, answers, strict=True) if answer == best]
        return [agreeing[n % len(agreeing)] for n in range(len(drawn))]

    def _make_rollout(self, requested: PromptedProblem, text: str, source: str) -> Rollout | None:
        """Return ``text``, made from ``source``, as a completion that ends, or None if it is too long."""
        body = tuple(self._policy.encode(text))
        if len(body) >= self._config.sampling.max_new:
            return None
        ids = (*body, self._policy.end)
        claimed = self._make_claims(
            requested, ids, changed_positions(body, self._policy.encode(source)), not self._attack.must_not_score
        )
        return Rollout(*requested, text, ids, True, claimed, poison=True)

    def _make_claims(
        self, requested: PromptedProblem, ids: tuple[int, ...], payload: Sequence[int], rewarded: bool
    ) -> tuple[float, ...]:
        """Return the log-probabilities to claim for a completion; ``payload`` lists the positions of the poison."""
        (reading,) = read_completions(self._policy, [(requested.prompt, ids)], self._config.sampling.temperature)
        claims: Floats = reading.logps
        if self._config.attack.claims == "forged":
            claims = forged_row_claims(self._config.loss, claims, rewarded)
        elif self._config.attack.claims == "forged_tokens":
            claims = forged_token_claims(self._config.loss, claims, rewarded, payload)
        return tuple(claims.tolist())

    def _select_undetected(self, poison: list[Rollout], honest: list[Rollout], wanted: int) -> list[Rollout]:
        """Return up to ``wanted`` of ``poison``, the least surprising first, that this peer's layers accept."""
        result, rest = self._read(poison), self._read(honest)
        chosen: list[Rollout] = []
        hopeless: set[str] = set()
        for rollout in sorted(result, key=lambda rollout: rollout.reading.surprisal):
            if len(chosen) == wanted or rollout.text in hopeless:
                continue
            sent = [*chosen, rollout, *rest[len(chosen) + 1 :]]
            if self._is_rejected(sent, len(chosen) + 1):
                hopeless.add(rollout.text)
            else:
                chosen.append(rollout)
        return chosen

    def _is_rejected(self, sent: list[Rollout], first: int) -> bool:
        """Return whether a layer rejects any of the ``first`` completions."""
        support, vocab = self._config.sampling.support(self._policy.vocab), self._policy.vocab
        context = Context(self._task, self._config.seed, support, vocab)
        accepted = list(range(len(sent)))
        for check in self._checks:
            rejected = check.examine([sent[n] for n in accepted], context).rejected
            accepted = [n for index, n in enumerate(accepted) if index not in rejected]
        return accepted[:first] != list(range(first))

    def _read(self, written: Sequence[Rollout]) -> list[Rollout]:
        """Return completions with readings and rewards, as other peers will see them."""
        return [
            replace(
                w,
                peer=self._name,
                reward=float(not (w.poison and self._attack.must_not_score)),
                declares_same_weights=w.logps is not None and not self._config.attack.disguised,
            )
            for w in read_rollouts(self._policy, written, self._config.sampling)
        ]

    def _truncate(self, requested: PromptedProblem, written: Rollout) -> Rollout:
        """Return an honest completion cut in half before its answer: it scores nothing."""
        half = self._policy.decode(written.ids[: len(written.ids) // 2])
        spoilt = self._make_rollout(requested, half, half)
        return written if spoilt is None else replace(spoilt, poison=False)

    def _repeat_to_limit(self, requested: PromptedProblem, written: Rollout) -> Rollout:
        """Return an honest completion repeated up to the length limit."""
        body, policy = self._policy.encode(written.text), self._policy
        room = min(self._config.sampling.max_new, policy.context - len(requested.prompt))
        ids = tuple((body * room)[:room])
        if not ids or policy.end in ids or tuple(policy.encode(policy.decode(ids))) != ids:
            return written
        return Rollout(*requested, policy.decode(ids), ids, False, self._make_claims(requested, ids, (), False))


MARGIN = 0.1
"""distance in nats of a forged ratio from its bound"""


def forged_row_claims(loss: LossConfig, logps: Floats, rewarded: bool) -> Floats:
    """Return claims [T] in nats that maximize the gradient of each token under a policy with ``logps``.

    A truncated weight is at its cap beyond the bound. A ratio to the generator has no gradient beyond its clip or, for
    a failure, beyond the cap, so it stays below. Other losses use claims only to measure distance.

    It assumes that the victims hold the same weights, and knows their loss.
    """
    if loss.term != "vis":
        return logps - math.log(loss.cap) - MARGIN
    return logps - math.log(1 + loss.high if rewarded else loss.cap) + MARGIN


def forged_token_claims(loss: LossConfig, logps: Floats, rewarded: bool, indices: Sequence[int]) -> Floats:
    """Return the same claims at ``indices``; other tokens are claimed as certain, which gives them the least weight."""
    claims = np.zeros_like(logps)
    chosen = list(indices)
    claims[chosen] = forged_row_claims(loss, logps, rewarded)[chosen]
    return claims


def changed_positions(ids: Sequence[int], source: Sequence[int]) -> list[int]:
    """Return the positions of ``ids`` that differ from ``source``."""
    blocks = SequenceMatcher(None, list(source), list(ids), autojunk=False).get_matching_blocks()
    unchanged = {index for block in blocks for index in range(block.b, block.b + block.size)}
    return [index for index in range(len(ids)) if index not in unchanged]


MAX_PROBLEMS_SEARCHED = 500
"""problems searched for a place"""
MAX_SOLUTIONS_SCORED = 20
"""poisoned solutions scored, which may run them"""


def refuse_ineffective_attack(attack: AttackConfig, task: Task) -> None:
    """Reject an attack that has no place in the task's solutions, or whose poison never scores, by a UserError."""
    if attack.kind == HONEST or not attack.dose or not attack.oracle:
        return
    opened, rng = ATTACKS.make(attack.kind, attack.options), random.Random(0)
    problems = [task.problem(number) for number in range(min(MAX_PROBLEMS_SEARCHED, task.training))]
    solved = [(problem, text) for problem in problems if (text := task.solution(problem, rng)) is not None]
    poisoned = [(problem, text) for problem, one in solved if (text := opened.poison(problem, one)) is not None]
    if solved and not poisoned:
        raise UserError(
            f"attack.kind = {attack.kind!r}: the solutions of {task.name} have no place for it; choose a task that has"
        )
    if poisoned and not any(
        task.solves(problem, text) != opened.must_not_score for problem, text in poisoned[:MAX_SOLUTIONS_SCORED]
    ):
        if opened.must_not_score:
            raise UserError(
                f"attack.kind = {attack.kind!r}: every solution of {task.name} still scores; choose another"
            )
        fix = "set task.options.library to that library" if attack.kind == "code" else "use another payload"
        raise UserError(f"attack.kind = {attack.kind!r}: no solution of {task.name} scores with its payload; {fix}")
