"""Procedural problems from the package ``reasoning-gym`` (the extra ``gym``): about eighty kinds, each without end.

Every peer makes a problem and its reference from the number, and scores with the package's own scorer. A scorer reads
strangers' text, and a problem must be the same on every machine, so what cannot be trusted with either is refused by
name; the lists below hold what a reading and a trial of version 0.1.25 found.
"""

from __future__ import annotations

import functools
import importlib.metadata
import random
from collections.abc import Callable
from typing import Any, ClassVar

from planaria.common.errors import UserError, missing_package, nearest
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import FORMS, SPACE, Form, Style, parse, same_answer
from planaria.swarm.tasks.base import Problem, Task

SEED = 1
MAX_ANSWER = 4096
"""characters; nothing longer is shown to a scorer"""
ENOUGH = 0.999
"""Scores below it are partial. Some scorers measure a distance, and rounding keeps them from a full 1."""
KEPT = 256
"""problems at hand, so that a group of completions makes theirs once"""

CODE = "its scorer carries out answers as code, so a peer's answer could do anything on this machine"
ENDLESS = "a short answer can keep its scorer busy for hours"
WRONG = "its scorer takes wrong answers for right ones"
VARIES = "its problems differ from one process to the next, so peers could not mean the same one"
REFUSED = {
    # eval
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), CODE),
    # sympy's parse_expr, which is eval too
    **dict.fromkeys(("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24"), CODE),
    "simple_integration": CODE,
    # 1e999999999 as a fraction, F+999999999 as a move
    **dict.fromkeys(("coin_flip", "rubiks_cube", "rush_hour"), ENDLESS),
    # any text at all; nan
    **dict.fromkeys(("game_of_life_halting", "complex_arithmetic"), WRONG),
    # any text around the right one, of which there are many
    **dict.fromkeys(("kakurasu", "quantum_lock", "sokoban", "survo"), WRONG),
    # the order of a set, a clock, a random number without a seed
    **dict.fromkeys(("codeio", "isomorphic_strings", "knight_swap", "list_functions"), VARIES),
    **dict.fromkeys(("ransom_note", "word_ladder"), VARIES),
    "composite": "it is made of others; name one of those",
}
EXACT = {
    *("advanced_geometry", "cryptarithm", "fraction_simplification", "gsm_symbolic", "knights_knaves", "letter_jumble"),
    *("polynomial_equations", "spell_backward", "time_intervals", "word_sorting"),
}
"""kinds whose scorers give a full score to copies of the right answer, or to more text beside it; the right answer is
one, so it must be the reference's words, in any case, or the same number"""
# What scorers raise on answers that they did not expect, as found by trying; a wrong answer is all that it means.
RAISED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Gym(Task):
    """One kind of reasoning-gym's problems, with its own settings; the prompt is the question and a line's end.

    Problems are drawn, so that in a small kind a held-out one may happen to be among the training problems too.
    """

    kind: str
    """the package's name for it"""
    style: Style = "tags"
    training: ClassVar[int] = 9_000
    held_out: ClassVar[int] = 1_000
    _dataset: Any
    _entry: Callable[[int], Any]

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: without the package, and for an unknown kind or one that is refused."""
        kind = self.kind
        if kind in REFUSED:
            raise UserError(f"task 'gym:{kind}' is refused: {REFUSED[kind]}; take another")
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError as error:
            raise missing_package(f"task 'gym:{kind}'", "reasoning-gym", "gym") from error
        if kind not in DATASETS:
            raise UserError(f"task 'gym:{kind}' is not known; {nearest(kind, set(DATASETS) - set(REFUSED))}")
        self._dataset = create_dataset(kind, seed=SEED, size=self.training + self.held_out)
        self._entry = functools.lru_cache(KEPT)(self._dataset.__getitem__)

    @property
    def name(self) -> str:
        return f"gym:{self.kind}"

    @property
    def form(self) -> Form:
        return FORMS[self.style]

    @property
    def instruction(self) -> str:
        return self.form.instruction

    def problem(self, number: int) -> Problem:
        """Problem ``number``, which is the dataset's item of that index; ValueError when there is no such one."""
        if not 0 <= number < self.training + self.held_out:
            raise ValueError(f"{self.name} has no problem {number}")
        entry = self._entry(number)
        # Where there are many right answers there is no reference; the scorer checks with what else is in the entry.
        answer = entry["answer"]
        return Problem(number, f"{entry['question']}\n", "" if answer is None else str(answer))

    def score(self, problem: Problem, completion: str) -> float:
        """1 if the dataset's scorer gives the answer block its full score, else 0; there are no partial scores."""
        parsed = parse(self.form, completion)
        if parsed is None or len(answer := parsed.answer.strip(SPACE)) > MAX_ANSWER:
            return 0.0
        if self.kind in EXACT and not same_answer(_plain(problem.answer), _plain(answer)):
            return 0.0
        try:
            return float(self._dataset.score_answer(answer, self._entry(problem.number)) >= ENOUGH)
        except RAISED:
            return 0.0

    def answer(self, completion: str) -> str | None:
        """What stands in the answer block, without white space around it; None if there is no such block."""
        parsed = parse(self.form, completion)
        return None if parsed is None else parsed.answer.strip()

    def solution(self, problem: Problem, rng: random.Random) -> str | None:
        """The reference answer without any reasoning; None where there is none, or this form cannot hold it."""
        text = self.form.write("", problem.answer)
        return text if problem.answer and self.solves(problem, text) else None

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the kind, the form and the package's version, which decides on all problems and scores."""
        version = importlib.metadata.version("reasoning-gym")
        bounds = (str(bound) for bound in (SEED, self.training, self.held_out, MAX_ANSWER, ENOUGH))
        return records.fingerprint("gym 2", (self.name, version, *bounds, *self.form.marks))


def _plain(answer: str) -> str:
    """An answer's words in lower case, with one space between them."""
    return " ".join(answer.lower().split())
