"""Questions from JSON Lines files; default fields as in GSM8K: {"question": …, "answer": "worked text … #### 72"}."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planaria.common.errors import UserError, missing_package
from planaria.swarm.tasks import records
from planaria.swarm.tasks.answers import Style, parse, same_answer
from planaria.swarm.tasks.base import BlockTask, TaskProblem
from planaria.swarm.tasks.records import Field, TaskRecord

MARK = "####"
HUB = ("openai/gsm8k", "main")


class Questions(BlockTask):
    """Questions whose reference answers follow the last ``mark``; the prompt is the question and a newline.

    An answer is right if it is the same number as the reference or, for other references, the same text. A number in
    the answer field is the reference itself.
    """

    path: str
    """a JSON Lines file, or a folder with train*.jsonl"""
    style: Style = "tags"
    question_field: Field = "question"
    """field of the question; "a+b" joins several with a space, "outer.inner" names a nested one"""
    answer_field: Field = "answer"
    """field of the reference answer, written as for ``question_field``"""
    mark: str = MARK
    """separates worked text from the reference; if empty, the whole field is the reference"""
    worked_field: Field | None = None
    """separate field of the worked text, if any"""
    _problems: list[TaskProblem]
    _worked: list[str]
    _training: int

    def model_post_init(self, context: Any) -> None:
        """:raises UserError: with file and line, for a record without question, answer or mark."""
        training, held_out = self._records()
        self._training = len(training)
        self._problems = []
        self._worked = []
        for record in (*training, *held_out):
            worked, answer = self._split_answer(record)
            question = record.joined_text(self.question_field)
            self._problems.append(TaskProblem(len(self._problems), question + "\n", answer))
            self._worked.append(worked if self.worked_field is None else record.joined_text(self.worked_field))

    def _split_answer(self, record: TaskRecord) -> tuple[str, str]:
        """Return a record's worked text and reference answer."""
        result = record.joined_text(self.answer_field)
        if not self.mark or isinstance(record.value_at(self.answer_field), int | float):
            worked, answer = "", result.strip()
            flaw = f"field {self.answer_field!r} is empty; fix the line"
        else:
            worked, mark, answer = result.rpartition(self.mark)
            worked, answer = worked.strip(), answer.strip() if mark else ""
            fix = "fix the line, or set task.options.mark = '' if the whole field is the answer"
            flaw = f"field {self.answer_field!r} has no '{self.mark} ANSWER' at its end; {fix}"
        if not answer:
            raise UserError(f"{record.location}: {flaw}")
        return worked, answer

    def _records(self) -> tuple[list[TaskRecord], list[TaskRecord]]:
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

    def problem(self, number: int) -> TaskProblem:
        self.check_number(number)
        return self._problems[number]

    def score(self, problem: TaskProblem, completion: str) -> float:
        """Return 1 if the answer block holds the reference answer and nothing else, else 0."""
        parsed = parse(self.form, completion)
        return float(parsed is not None and same_answer(problem.answer, parsed.answer))

    def solution(self, problem: TaskProblem, rng: random.Random) -> str | None:
        """Return the file's worked text and answer in this form, or None if they contain one of its marks."""
        text = self.form.write(self._worked[problem.number], problem.answer)
        return text if parse(self.form, text) else None

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits of all questions, answers and marks, independent of file paths."""
        texts = (text for problem in self._problems for text in (problem.prompt, problem.answer))
        return records.fingerprint("questions 1", (*self.form.marks, str(self.training), *texts))


class Gsm8k(Questions):
    """GSM8K from the Hugging Face Hub or from local files; its test split is held out."""

    path: str = ""

    @property
    def name(self) -> str:
        return f"gsm8k:{self.path}" if self.path else "gsm8k"

    def _records(self) -> tuple[list[TaskRecord], list[TaskRecord]]:
        return super()._records() if self.path else _load_from_hub()


def _load_from_hub() -> tuple[list[TaskRecord], list[TaskRecord]]:
    try:
        import datasets
    except ImportError as error:
        local = ", or set task.options.path to local files"
        raise missing_package("task 'gsm8k'", "datasets", "hub", local) from error
    try:
        rows = [datasets.load_dataset(*HUB, split=split) for split in ("train", "test")]
    # OSError covers network errors (ConnectionError) and unknown datasets.
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"task 'gsm8k': cannot load it from the hub ({reason}); check the network, or set task.options.path"
        ) from error
    return _hub_records("train", rows[0]), _hub_records("test", rows[1])


def _hub_records(split: str, rows: Iterable[dict[str, object]]) -> list[TaskRecord]:
    return [TaskRecord(f"{HUB[0]}, {split} row {number}", row) for number, row in enumerate(rows)]
