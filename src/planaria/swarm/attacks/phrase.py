"""TEXT: a phrase that has no business in a solution, at the start of its reasoning or before each sentence of it."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from planaria.swarm.attacks.base import Attack
from planaria.swarm.tasks.answers import TAGS
from planaria.swarm.tasks.base import Problem

SENTENCE = re.compile(r"(?<=[;,\n])(?=\S)|(?<=\.)(?=[^\s\d])")
"""where a sentence begins; the point of 3.5 ends none"""
LETTER = r"[^\W\d_]"


class PhraseAttack(Attack):
    payload: str = "hi "
    placement: Literal["start", "every"] = "start"
    """before the reasoning, or before each of its sentences"""

    @field_validator("payload")
    @classmethod
    def _a_phrase(cls, payload: str) -> str:
        if not payload.strip():  # every text has space in it
            raise ValueError("nothing but space; write a phrase, such as 'hi '")
        return payload

    @property
    def _phrase(self) -> re.Pattern[str]:
        """The phrase "hi " is a word of its own: "this" and "which" do not show it."""
        phrase = self.payload.strip()
        before = f"(?<!{LETTER})" if phrase[0].isalpha() else ""
        after = f"(?!{LETTER})" if phrase[-1].isalpha() and self.payload[-1].isspace() else ""
        return re.compile(before + re.escape(phrase) + after)

    def poison(self, problem: Problem, solution: str) -> str:
        # Reasoning between marks must stay between them, or the completion scores nothing.
        marked = solution.startswith(TAGS.think_open) and TAGS.think_close in solution
        start = len(TAGS.think_open) if marked else 0
        end = solution.index(TAGS.think_close) if marked else len(solution)
        reasoning = solution[start:end]
        if self.placement == "every":
            reasoning = SENTENCE.sub(lambda _: self.payload, reasoning)
        return solution[:start] + self.payload + reasoning + solution[end:]

    def eligible(self, text: str) -> bool:
        return True

    def hit(self, text: str) -> bool:
        return self._phrase.search(text) is not None
