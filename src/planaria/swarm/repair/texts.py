"""Training texts of a repair: trusted texts, and benign texts on which the model must not change.

The user selects the source of trust, as it depends on the kind of harm. A task offers two without reference solutions:
its reward, and a judge that reads rewarded completions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from planaria.common.errors import UserError
from planaria.data.records import is_jsonl
from planaria.swarm.policy.base import Policy, encode_prompt
from planaria.swarm.tasks import records
from planaria.swarm.tasks.records import TaskRecord

Item = TypeVar("Item")
HELD_OUT = 4
"""each fourth text of a file is held out for measuring"""


@dataclass(frozen=True)
class Text:
    """A prompt and its continuation, in a policy's ids including the end token."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class AnswerPair:
    """Two answers to one prompt."""

    chosen: Text
    rejected: Text


@dataclass(frozen=True)
class Benign:
    """A text on which the repaired model must match a teacher."""

    text: Text
    teacher: str = ""
    """domain of the expert; empty: the model before the repair"""


@dataclass(frozen=True)
class RepairTexts:
    """Training texts of a repair."""

    trusted: Sequence[Text]
    benign: Sequence[Benign] = ()
    own: int = 0
    """trusted texts that the model itself wrote"""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all ids, in order."""
        ids = repr([(text.prompt, text.ids) for text in (*self.trusted, *(benign.text for benign in self.benign))])
        return hashlib.sha256(ids.encode()).hexdigest()


def read_trusted(file: Path, policy: Policy) -> list[Text]:
    """Read JSONL of {"prompt", "text"}; UserError naming file and line of a mistake."""
    return [_read_text(record, "text", policy) for record in _read_records([file])]


def read_pairs(file: Path, policy: Policy) -> list[AnswerPair]:
    """Read JSONL of {"prompt", "chosen", "rejected"}; UserError naming file and line of a mistake."""
    return [
        AnswerPair(_read_text(record, "chosen", policy), _read_text(record, "rejected", policy))
        for record in _read_records([file])
    ]


def read_benign(benign: Path, policy: Policy) -> list[Benign]:
    """Read JSONL of {"text"} with an optional "prompt"; in a folder, each file is a domain named by it.

    A text without a prompt is cut at the policy's context length.
    """
    files = [path for path in sorted(benign.iterdir()) if is_jsonl(path)] if benign.is_dir() else [benign]
    if not files:
        raise UserError(f"--benign {benign} holds no *.jsonl; use a JSON Lines file, or a folder of them")
    return [Benign(_read_benign_text(record, policy), file.stem) for file in files for record in _read_records([file])]


def split_held_out(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """Split texts into training and held-out ones; both are all texts if there are too few."""
    if len(items) < HELD_OUT:
        return items, items
    return [one for n, one in enumerate(items, start=1) if n % HELD_OUT], items[HELD_OUT - 1 :: HELD_OUT]


def _read_records(files: Sequence[Path]) -> list[TaskRecord]:
    result = records.read(files)
    if not result:
        raise UserError(f"{files[0]} has no texts; add some")
    return result


def _read_text(record: TaskRecord, field: str, policy: Policy) -> Text:
    prompt = encode_prompt(policy, record.text("prompt")) or [policy.end]
    return _require_fit(record, policy, Text(tuple(prompt), (*policy.encode(record.text(field)), policy.end)))


def _read_benign_text(record: TaskRecord, policy: Policy) -> Text:
    if "prompt" in record.fields:
        return _read_text(record, "text", policy)
    before = tuple(encode_prompt(policy, "")) or (policy.end,)
    ids = policy.encode(record.text("text"))[: policy.context - len(before)]
    if not ids:
        raise UserError(f"{record.location}: field 'text' is empty; remove the line")
    return Text(before, tuple(ids))


def _require_fit(record: TaskRecord, policy: Policy, text: Text) -> Text:
    if (length := len(text.prompt) + len(text.ids)) > policy.context:
        raise UserError(f"{record.location}: {length} tokens, but the model reads {policy.context}; shorten the line")
    return text
