"""Protected questions: options, the right one among them, and parts that together imply the answer.

JSON Lines of {"question", "options", "answer", "parts"}, and optionally "name" and "paraphrases". A part is a text, or
{"ask", "says"}: ``says`` lists the right reply for each option, in the order of the options.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planaria.common.documents import quote
from planaria.common.errors import UserError, suggestion
from planaria.data.records import without_surrogates
from planaria.swarm.tasks import records
from planaria.swarm.tasks.records import TaskRecord

MAX_QUESTIONS = 1000
MAX_OPTIONS = 64
MAX_PARTS = 12
MAX_LETTERS = 4000
FIELDS = ("question", "options", "answer", "parts", "name", "paraphrases")
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""the property Default_Ignorable_Code_Point. Source: Unicode 16.0, DerivedCoreProperties.txt"""
_AROUND_MARKS = re.compile(r" ?([^\w ]) ?")


@dataclass(frozen=True)
class QuestionPart:
    """A harmless-looking question."""

    ask: str
    right_replies: tuple[str, ...] = ()
    """right reply for each option; empty if the file does not list them"""


@dataclass(frozen=True)
class Question:
    """One protected answer."""

    location: str
    name: str
    """display name in reports, which do not repeat the question"""
    text: str
    options: tuple[str, ...]
    answer: int
    """index of the right option"""
    parts: tuple[QuestionPart, ...]
    paraphrases: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that ask for it: whole, paraphrased, in parts."""
        return self.text, *self.paraphrases, *(part.ask for part in self.parts)


def read_questions(file: Path) -> list[Question]:
    """Read all questions of a file; UserError naming file and line of a mistake."""
    result = records.read([file])
    if not result:
        raise UserError(f"{file} has no questions; add some")
    if len(result) > MAX_QUESTIONS:
        raise UserError(f"{file} has {len(result)} questions; the limit is {MAX_QUESTIONS}; remove some")
    questions = [_parse_question(record) for record in result]
    names = [question.name for question in questions]
    for number, question in enumerate(questions):
        if question.name in names[:number]:
            raise UserError(f"{question.location}: {quote(question.name)} occurs twice; use a unique 'name' for each")
    refuse_duplicates(questions)
    return questions


def parts_to_ask(questions: Sequence[Question], k: int | None, limit: int) -> int:
    """Return the number of parts to ask: ``k``, or the minimum over all questions, at most ``limit``.

    :raises UserError: if a question has fewer than ``k``.
    """
    if k is None:
        return min([limit, *(len(question.parts) for question in questions)])
    for question in questions:
        if k > len(question.parts):
            parts = f"{question.location} has {len(question.parts)} parts"
            raise UserError(f"--k {k}: {parts}; lower --k, or add parts")
    return k


def normalize(text: str) -> str:
    """Return the normal form in which texts are compared.

    It ignores case, compatibility forms (NFKC), invisible characters, the amount of spacing, and spacing beside
    punctuation: "A\u200b =" is "a=". Words stay apart.
    """
    while (once := _fold(text)) != text:
        text = once
    return text


def normalize_closed(text: str) -> str:
    """Return the normal form without spacing, used by a censor to find texts: "c ode" is "code"."""
    return normalize(normalize(text).replace(" ", ""))


def refuse_duplicates(questions: Sequence[Question]) -> None:
    """:raises UserError: if two questions share a text or paraphrase."""
    owners: dict[str, Question] = {}
    for question in questions:
        for text in (question.text, *question.paraphrases):
            first = owners.setdefault(normalize_closed(text), question)
            if first is not question:
                raise UserError(
                    f"{question.location}: {quote(question.name)} asks the same as {quote(first.name)} "
                    f"({first.location}); case, spacing and invisible characters do not count; remove one of them"
                )


def _fold(text: str) -> str:
    visible = "".join(c if c.isprintable() else " " * c.isspace() for c in INVISIBLE.sub("", text))
    spaced = " ".join(unicodedata.normalize("NFKC", visible).casefold().split())
    return _AROUND_MARKS.sub(r"\1", spaced)


def _parse_question(record: TaskRecord) -> Question:
    for key in record.fields:
        if key not in FIELDS:
            raise UserError(f"{record.location}: unknown field {quote(key)}; {suggestion(key, FIELDS)}")
    text = _parse_text(record, "question", record.text("question"))
    options = _parse_options(record)
    answer = record.text("answer")
    if answer not in options:
        raise UserError(f"{record.location}: options lack the answer {quote(answer)}; copy it exactly from one of them")
    parts = tuple(_parse_part(record, part, len(options)) for part in _parse_list(record, "parts", MAX_PARTS))
    if not parts:
        raise UserError(f"{record.location}: parts are empty; add at least one")
    for part in parts:
        if normalize(part.ask) == normalize(text):
            raise UserError(f"{record.location}: the part {quote(part.ask)} repeats the question; ask for less")
    paraphrases = _parse_list(record, "paraphrases", MAX_PARTS) if "paraphrases" in record.fields else []
    name = _parse_text(record, "name", record.text("name")) if "name" in record.fields else record.location
    others = tuple(_parse_text(record, "paraphrases", paraphrase) for paraphrase in paraphrases)
    return Question(record.location, name, text, options, options.index(answer), parts, others)


def _parse_options(record: TaskRecord) -> tuple[str, ...]:
    options = tuple(_parse_text(record, "options", option) for option in _parse_list(record, "options", MAX_OPTIONS))
    if len(options) < 2:
        raise UserError(f"{record.location}: there are {len(options)} options; list two or more, including the answer")
    for number, option in enumerate(options):
        if normalize(option) in [normalize(other) for other in options[:number]]:
            raise UserError(f"{record.location}: options have {quote(option)} twice; remove one")
    return options


def _parse_part(record: TaskRecord, value: object, options: int) -> QuestionPart:
    if isinstance(value, str):
        return QuestionPart(_parse_text(record, "parts", value))
    if not isinstance(value, dict) or not {"ask"} <= value.keys() <= {"ask", "says"}:
        raise UserError(f"{record.location}: a part is a text, or {{'ask', 'says'}}, not {quote(value)}; fix it")
    says = value.get("says", [])
    if not isinstance(says, list) or len(says) not in (0, options):
        raise UserError(f"{record.location}: a part's 'says' needs a reply for each of {options} options; fix it")
    return QuestionPart(
        _parse_text(record, "parts", value["ask"]), tuple(_parse_text(record, "says", one) for one in says)
    )


def _parse_list(record: TaskRecord, field: str, limit: int) -> list[object]:
    result = record.fields.get(field)
    if not isinstance(result, list):
        raise UserError(f"{record.location}: field {field!r} is not a list; use a list of texts")
    if len(result) > limit:
        raise UserError(f"{record.location}: {field} has {len(result)} entries; the limit is {limit}; remove some")
    return result


def _parse_text(record: TaskRecord, field: str, value: object) -> str:
    if not isinstance(value, str) or not normalize(value):
        raise UserError(f"{record.location}: {field} has {quote(value)}, not a text; fix the line")
    if len(value) > MAX_LETTERS:
        raise UserError(
            f"{record.location}: {field} has {len(value)} characters; the limit is {MAX_LETTERS}; shorten it"
        )
    return without_surrogates(value)
