"""TEXT: a phrase that has no business in a solution, at its start or before each of its sentences."""

from __future__ import annotations

import re
from typing import Literal

from planaria.swarm.tasks.base import Problem

SENTENCE = re.compile(r"(?<=[.;,\n])(?=\S)")


class PhraseAttack:
    kind = "text"

    def __init__(self, payload: str, placement: Literal["start", "every"]) -> None:
        self.payload, self._placement = payload or "hi ", placement

    def poison(self, problem: Problem, solution: str) -> str:
        if self._placement == "start":
            return self.payload + solution
        return self.payload + SENTENCE.sub(lambda _: self.payload, solution)

    def eligible(self, text: str) -> bool:
        return True

    def hit(self, text: str) -> bool:
        return self.payload.strip() in text
