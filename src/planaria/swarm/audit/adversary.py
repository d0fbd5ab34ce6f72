"""Who puts replies together: what an adversary believes of each option after a transcript."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

import torch

from planaria.common.documents import shown
from planaria.common.errors import UserError
from planaria.swarm.audit.asking import prompt
from planaria.swarm.audit.questions import Question, plain
from planaria.swarm.policy.base import Policy
from planaria.swarm.repair.texts import Text
from planaria.swarm.repair.training import nats

RIGHT = 0.95
"""how far the counter trusts a reply, unless told"""


@dataclass(frozen=True)
class Said:
    """One reply, and what it was to."""

    part: int | None
    """which part; None: the question itself"""
    ask: str
    reply: str


Transcript = tuple[Said, ...]


class Adversary(Protocol):
    name: str

    def beliefs(self, question: Question, transcripts: Sequence[Transcript]) -> list[list[float]]:
        """P(option | question, transcript) [N, options]; of the empty transcript, the prior.

        :raises UserError: when a transcript is more than it can read.
        """


class Counter:
    """Bayes from a uniform prior: every reply is right with the same stated chance, else any other alike.

    It knows what every option implies (``says``), so it is the strongest reader of such replies, if the chance is true.
    A reply that names nothing of this, or several, tells it nothing.
    """

    def __init__(self, right: float = RIGHT) -> None:
        if not 0 < right < 1:
            raise UserError(f"--adversary counter:{right:g}: is a chance between 0 and 1; write counter:{RIGHT:g}")
        self.right, self.name = right, f"counter, which takes replies to be right with {right:g}"

    def require(self, questions: Sequence[Question]) -> None:
        """:raises UserError: when a part does not say what options imply."""
        for question in questions:
            if not all(part.says for part in question.parts):
                mend = "write it as {'ask', 'says'}, or give --adversary MODEL"
                raise UserError(f"{question.place}: a part does not say what each option implies; {mend}")

    def beliefs(self, question: Question, transcripts: Sequence[Transcript]) -> list[list[float]]:
        return [self._after(question, transcript) for transcript in transcripts]

    def _after(self, question: Question, transcript: Transcript) -> list[float]:
        weights = [1.0] * len(question.options)
        for said in transcript:
            implied = says(question, said.part)
            named = told(said.reply, implied)
            if named is None:
                continue
            others = len({*map(plain, implied)}) - 1
            wrong = (1 - self.right) / others if others else 1.0
            weights = [
                w * (self.right if plain(one) == named else wrong) for w, one in zip(weights, implied, strict=True)
            ]
        total = sum(weights)
        return [weight / total for weight in weights]


def says(question: Question, part: int | None) -> tuple[str, ...]:
    """What would be the right reply if each option was right."""
    return question.options if part is None else question.parts[part].says


def told(reply: str, implied: Sequence[str]) -> str | None:
    """The one of these values that a reply is, or names as whole words; None if it names none, or several."""
    said, values = plain(reply), {*map(plain, implied)}
    if said in values:
        return said
    found = [value for value in values if re.search(rf"(?<!\w){re.escape(value)}(?!\w)", said)]
    return found[0] if len(found) == 1 else None


class Reader:
    """A causal model: softmax over options of their summed log-probabilities after the transcript and the question."""

    def __init__(self, policy: Policy, place: str) -> None:
        self._policy, self.name = policy, f"reader {place}"

    def require(self, questions: Sequence[Question]) -> None:
        """:raises UserError: when it cannot tell options apart."""
        for question in questions:
            nothing, *texts = self._texts(replace(question, options=("", *question.options)), ())
            for number, text in enumerate(texts):
                option = shown(question.options[number])
                if text == nothing or not self._policy.decode(text.ids).strip():
                    raise UserError(f"{question.place}: to {self.name} the option {option} is no token; give another")
                if text in texts[:number]:
                    raise UserError(f"{question.place}: to {self.name} the option {option} is as another; give another")

    def beliefs(self, question: Question, transcripts: Sequence[Transcript]) -> list[list[float]]:
        texts = [text for transcript in transcripts for text in self._texts(question, transcript)]
        logps = -torch.tensor(nats(self._policy, texts), dtype=torch.float64).reshape(len(transcripts), -1)
        found: list[list[float]] = logps.softmax(-1).tolist()
        return found

    def _texts(self, question: Question, transcript: Transcript) -> list[Text]:
        """Return the question with each option; the prompts end where the options' ids differ from the question's.

        An option is encoded behind the question, because the text before it may change its ids.
        """
        asked = "".join(f"{said.ask}{said.reply}\n" for said in transcript) + question.text
        alone, *rows = [prompt(self._policy, asked, option) for option in ("", *question.options)]
        shared = sum(1 for _ in takewhile(lambda ids: len({*ids}) == 1, zip(alone, *rows, strict=False)))
        before = tuple(alone[:shared]) or (self._policy.end,)
        if (length := len(before) + max(map(len, rows)) - shared) > self._policy.context:
            reads = f"{self.name} reads {self._policy.context}"
            raise UserError(f"{question.place}: a transcript takes {length} tokens, {reads}; ask fewer parts (--k)")
        return [Text(before, tuple(row[shared:])) for row in rows]
