"""Procedural problems from the package ``reasoning-gym`` (the extra ``gym``): about eighty kinds.

Every peer generates a problem and its reference from the number and scores with the package's scorer. Kinds whose
scorer is unsafe for untrusted text, or whose problems differ between machines, are rejected by name. The lists below
follow from a review of version 0.1.25.
"""

from __future__ import annotations

import functools
import importlib.metadata
import random
from collections.abc import Callable
from typing import Any, ClassVar

from planaria.common.errors import UserError, missing_package, suggestion
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import SPACE, Style, parse, same_answer
from planaria.swarm.tasks.base import BlockTask, TaskProblem

SEED = 1
MAX_ANSWER = 4096
"""maximum characters of an answer shown to a scorer"""
ENOUGH = 0.999
"""lowest full score; some scorers measure a distance, and rounding keeps them below 1"""
CACHED = 256
"""cached problems, so that a group of completions generates its problem once"""

CODE = "its scorer evaluates answers as code, so a peer's answer could do anything on this machine"
ENDLESS = "a short answer can keep its scorer busy for hours"
WRONG = "its scorer accepts wrong answers"
VARIES = "its problems differ from one process to the next, so peers would not get the same problem"
REFUSED = {
    # eval
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), CODE),
    # sympy's parse_expr, which is eval too
    **dict.fromkeys(("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24"), CODE),
    "simple_integration": CODE,
    # 1e999999999 as a fraction, F+999999999 as a move
    **dict.fromkeys(("coin_flip", "rubiks_cube", "rush_hour"), ENDLESS),
    # accepts any text; nan
    **dict.fromkeys(("game_of_life_halting", "complex_arithmetic"), WRONG),
    # accepts text around a right answer, of which there are many
    **dict.fromkeys(("kakurasu", "quantum_lock", "sokoban", "survo"), WRONG),
    # the order of a set, a clock, a random number without a seed
    **dict.fromkeys(("codeio", "isomorphic_strings", "knight_swap", "list_functions"), VARIES),
    **dict.fromkeys(("ransom_note", "word_ladder"), VARIES),
    "composite": "it combines other kinds; use one of those",
}
EXACT = {
    *("advanced_geometry", "cryptarithm", "fraction_simplification", "gsm_symbolic", "knights_knaves", "letter_jumble"),
    *("polynomial_equations", "spell_backward", "time_intervals", "word_sorting"),
}
"""kinds whose scorers accept copies of the right answer or additional text. Their answer is unique, so it must equal
the reference: the same words in any case, or the same number"""
# Exceptions of scorers on unexpected answers; each means a wrong answer.
RAISED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Gym(BlockTask):
    """One kind of reasoning-gym problems with its default settings; the prompt is the question and a newline.

    Problems are drawn at random, so in a small kind a held-out problem may also occur in training.
    """

    kind: str
    """the package's name of the kind"""
    style: Style = "tags"
    training: ClassVar[int] = 9_000
    held_out: ClassVar[int] = 1_000
    _dataset: Any
    _entry: Callable[[int], Any]

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: without the package, and for an unknown or rejected kind."""
        kind = self.kind
        if kind in REFUSED:
            raise UserError(f"task 'gym:{kind}' is refused: {REFUSED[kind]}; choose another kind")
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError as error:
            raise missing_package(f"task 'gym:{kind}'", "reasoning-gym", "gym") from error
        if kind not in DATASETS:
            raise UserError(f"task 'gym:{kind}' is not known; {suggestion(kind, set(DATASETS) - set(REFUSED))}")
        self._dataset = create_dataset(kind, seed=SEED, size=self.training + self.held_out)
        self._entry = functools.lru_cache(CACHED)(self._dataset.__getitem__)

    @property
    def name(self) -> str:
        return f"gym:{self.kind}"

    def problem(self, number: int) -> TaskProblem:
        """Return item ``number`` of the dataset; its answer is empty if there is no unique reference."""
        self.check_number(number)
        entry = self._entry(number)
        answer = entry["answer"]
        return TaskProblem(number, f"{entry['question']}\n", "" if answer is None else str(answer))

    def score(self, problem: TaskProblem, completion: str) -> float:
        """Return 1 if the dataset's scorer gives the answer block its full score, else 0."""
        parsed = parse(self.form, completion)
        if parsed is None or len(answer := parsed.answer.strip(SPACE)) > MAX_ANSWER:
            return 0.0
        if self.kind in EXACT and not same_answer(_normalize(problem.answer), _normalize(answer)):
            return 0.0
        try:
            return float(self._dataset.score_answer(answer, self._entry(problem.number)) >= ENOUGH)
        except RAISED:
            return 0.0

    def solution(self, problem: TaskProblem, rng: random.Random) -> str | None:
        """Return the reference answer without reasoning, or None if there is none or the form cannot hold it."""
        text = self.form.write("", problem.answer)
        return text if problem.answer and self.solves(problem, text) else None

    @property
    def fingerprint(self) -> str:
        version = importlib.metadata.version("reasoning-gym")
        bounds = (str(bound) for bound in (SEED, self.training, self.held_out, MAX_ANSWER, ENOUGH))
        return records.fingerprint("gym 2", (self.name, version, *bounds, *self.form.marks))


def _normalize(answer: str) -> str:
    return " ".join(answer.lower().split())
