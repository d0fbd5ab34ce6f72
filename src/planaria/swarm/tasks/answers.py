"""Parse a completion into reasoning and answer; compare short answers."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

SPACE = " \t\r\n"
MAX_NUMBER = 64  # characters


@dataclass(frozen=True)
class AnswerMarks:
    """Marks around reasoning and answer; without think marks all text before the answer is reasoning."""

    think_open: str
    think_close: str
    answer_open: str
    answer_close: str

    def __post_init__(self) -> None:
        marks = self.marks
        if not (self.answer_open and self.answer_close) or bool(self.think_open) != bool(self.think_close):
            raise ValueError(f"{self}: a block needs both its marks")
        if any(one in other for i, one in enumerate(marks) for j, other in enumerate(marks) if i != j):
            raise ValueError(f"{self}: a mark is part of another")

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.think_open, self.think_close, self.answer_open, self.answer_close)))

    @property
    def instruction(self) -> str:
        """Return the prompt text that asks a model for this form."""
        answer = f"the final answer alone between {self.answer_open} and {self.answer_close}, and nothing after it"
        if not self.think_open:
            return f"Solve the problem. Write your reasoning first, then {answer}."
        return (
            f"Solve the problem. Write your reasoning between {self.think_open} and {self.think_close}, then {answer}."
        )

    def write(self, reasoning: str, answer: str) -> str:
        """Return the completion that :func:`parse` reads back as these two, unless either contains a mark."""
        return f"{self.think_open}{reasoning}{self.think_close}{self.answer_open}{answer}{self.answer_close}"


@dataclass(frozen=True)
class Parsed:
    """Exact text between the marks."""

    reasoning: str
    answer: str


TAGS = AnswerMarks("<think>", "</think>", "<answer>", "</answer>")
BRACKETS = AnswerMarks("", "", "[", "]")
Style = Literal["tags", "brackets"]
FORMS: dict[Style, AnswerMarks] = {"tags": TAGS, "brackets": BRACKETS}


def parse(form: AnswerMarks, text: str) -> Parsed | None:
    """Return reasoning and answer, or None unless the completion has exactly the form's shape.

    Each mark must occur once and in order, with only white space outside the blocks. Takes O(len(text)) time.
    """
    ends: list[int] = []  # where each mark ends
    for mark in form.marks:
        start = text.find(mark)
        if start < (ends[-1] if ends else 0) or text.find(mark, start + 1) >= 0:
            return None
        ends.append(start + len(mark))
    answer = text[ends[-2] : ends[-1] - len(form.answer_close)]
    before = text[: ends[-2] - len(form.answer_open)]
    if text[ends[-1] :].strip(SPACE):
        return None
    if not form.think_open:
        return Parsed(before, answer)
    reasoning = text[ends[0] : ends[1] - len(form.think_close)]
    outside = before[: ends[0] - len(form.think_open)] + before[ends[1] :]
    return None if outside.strip(SPACE) else Parsed(reasoning, answer)


def same_answer(reference: str, answer: str) -> bool:
    """Return whether two answers are the same number or, if the reference is not a number, the same text.

    Surrounding white space is ignored. Numbers are compared exactly, as decimals, regardless of a leading currency
    sign, a trailing percent sign, thousands separators and trailing zeros.
    """
    number = _number(reference)
    return reference.strip(SPACE) == answer.strip(SPACE) if number is None else number == _number(answer)


def canonical(answer: str) -> str:
    """Return a text that is equal for equal answers: a fraction in lowest terms if the answer is a number."""
    number = _number(answer)
    return answer.strip(SPACE) if number is None else str(Fraction(number))


def _number(text: str) -> Decimal | None:
    """Return the text's number, or None; 1e9, 0x10 and 1_000 are not numbers."""
    text = text.strip(SPACE)
    if len(text) > MAX_NUMBER:
        return None
    sign = text[: text[:1] in ("-", "+")]
    whole, point, rest = text[len(sign) :].removeprefix("$").removesuffix("%").partition(".")
    groups = whole.split(",")
    if len(groups) > 1 and not (1 <= len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:])):
        return None
    digits = "".join(groups)
    if not digits + rest or not all(d in "0123456789" for d in digits + rest):
        return None
    return Decimal(f"{sign}{digits or 0}{point}{rest}")
