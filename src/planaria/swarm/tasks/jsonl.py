"""Questions with answers in fields of any names, unless said as GSM8K has them: {"question": …, "answer": "worked text
… #### 72"}."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planaria.common.errors import UserError, missing_package
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import FORMS, Form, Style, parse, same_answer
from planaria.swarm.tasks.base import Problem, Task
from planaria.swarm.tasks.records import Field, Record

MARK = "####"
HUB = ("openai/gsm8k", "main")


class Questions(Task):
    """Questions whose reference answers stand after the last ``mark``; the prompt is the question and a line's end.

    An answer is right when it is the same number as the reference or, where that is no number, the same text. A number
    in the file is the reference as it stands.
    """

    path: str
    """a JSON Lines file, or a folder with train*.jsonl"""
    style: Style = "tags"
    question_field: Field = "question"
    """the field of the question; several with + between them are joined by a space, inner ones named as outer.inner"""
    answer_field: Field = "answer"
    """the field of the reference answer, as those of the question"""
    mark: str = MARK
    """stands before the reference in its field, behind worked text; where empty, the whole field is the reference"""
    worked_field: Field | None = None
    """the field of the worked text, if it has one of its own"""
    _problems: list[Problem]
    _worked: list[str]
    _training: int

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: naming file and line, for a record without question, answer or mark."""
        training, held_out = self._records()
        self._training, self._problems, self._worked = len(training), [], []
        for record in (*training, *held_out):
            worked, answer = self._answered(record)
            question = record.joined(self.question_field)
            self._problems.append(Problem(len(self._problems), question + "\n", answer))
            self._worked.append(worked if self.worked_field is None else record.joined(self.worked_field))

    def _answered(self, record: Record) -> tuple[str, str]:
        """The worked text and the reference in a record's answer."""
        found = record.joined(self.answer_field)
        if not self.mark or isinstance(record.at(self.answer_field), int | float):
            worked, answer = "", found.strip()
            said = f"field {self.answer_field!r} is empty; mend the line"
        else:
            worked, mark, answer = found.rpartition(self.mark)
            worked, answer = worked.strip(), answer.strip() if mark else ""
            mend = "mend the line, or write task.options.mark = '' if all of it is the answer"
            said = f"field {self.answer_field!r} has no '{self.mark} ANSWER' at its end; {mend}"
        if not answer:
            raise UserError(f"{record.place}: {said}")
        return worked, answer

    def _records(self) -> tuple[list[Record], list[Record]]:
        """To train on, and held out; UserError as in :func:`records.read_split`."""
        return records.read_split(Path(self.path))

    @property
    def name(self) -> str:
        return f"jsonl:{self.path}"

    @property
    def training(self) -> int:
        return self._training

    @property
    def held_out(self) -> int:
        return len(self._problems) - self._training

    @property
    def form(self) -> Form:
        return FORMS[self.style]

    @property
    def instruction(self) -> str:
        return self.form.instruction

    def problem(self, number: int) -> Problem:
        """Question ``number`` in the order of the files; ValueError when there is no such one."""
        if not 0 <= number < len(self._problems):
            raise ValueError(f"{self.name} has no problem {number}")
        return self._problems[number]

    def score(self, problem: Problem, completion: str) -> float:
        """1 if the answer block holds the reference answer and nothing else, else 0."""
        parsed = parse(self.form, completion)
        return float(parsed is not None and same_answer(problem.answer, parsed.answer))

    def answer(self, completion: str) -> str | None:
        """What stands in the answer block, without white space around it; None if there is no such block."""
        parsed = parse(self.form, completion)
        return None if parsed is None else parsed.answer.strip()

    def solution(self, problem: Problem, rng: random.Random) -> str | None:
        """The file's worked text and answer in this task's form; None where it holds a mark of the form itself."""
        text = self.form.write(self._worked[problem.number], problem.answer)
        return text if parse(self.form, text) else None

    @property
    def fingerprint(self) -> str:
        """16 hex digits of all questions, answers and marks; where the files lie is no part of it."""
        texts = (text for problem in self._problems for text in (problem.prompt, problem.answer))
        return records.fingerprint("questions 1", (*self.form.marks, str(self.training), *texts))


class Gsm8k(Questions):
    """GSM8K from the Hugging Face hub, unless local files are named; its own test split is held out."""

    path: str = ""

    @property
    def name(self) -> str:
        return f"gsm8k:{self.path}" if self.path else "gsm8k"

    def _records(self) -> tuple[list[Record], list[Record]]:
        return super()._records() if self.path else _hub()


def _hub() -> tuple[list[Record], list[Record]]:
    """Both splits; UserError when they cannot be had."""
    try:
        import datasets
    except ImportError as error:
        local = ", or name local files in task.options.path"
        raise missing_package("task 'gsm8k'", "datasets", "hub", local) from error
    try:
        rows = [datasets.load_dataset(*HUB, split=split) for split in ("train", "test")]
    # OSError covers the network (ConnectionError and its kin) and datasets that are not there.
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"task 'gsm8k': cannot load it from the hub ({reason}); check the network, or give task.options.path"
        ) from error
    return _from_hub("train", rows[0]), _from_hub("test", rows[1])


def _from_hub(split: str, rows: Iterable[dict[str, object]]) -> list[Record]:
    return [Record(f"{HUB[0]}, {split} row {number}", row) for number, row in enumerate(rows)]
