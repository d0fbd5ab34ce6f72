"""What a repair learns from: texts that somebody vouches for, and texts on which the model is to stay as it is.

Whose word counts is asked of the user, for it depends on how the harm shows. A task has two that need no reference
solutions: its reward, and a judge that reads what scores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planaria.common.errors import UserError
from planaria.data.records import is_jsonl
from planaria.swarm.policy.base import Policy, encode_prompt
from planaria.swarm.tasks import records
from planaria.swarm.tasks.records import Record

HELD_OUT = 4
"""of a file's texts, each so manieth is measured on and not learned from"""


@dataclass(frozen=True)
class Text:
    """A prompt and what follows it, in a policy's ids; the end token is one of them."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, of which the first is wanted."""

    chosen: Text
    rejected: Text


@dataclass(frozen=True)
class Benign:
    """A text on which the repaired model is to say what a teacher says."""

    text: Text
    teacher: str = ""
    """the domain whose expert knows it; none: the model before the repair"""


@dataclass(frozen=True)
class Texts:
    """All that a repair learns from."""

    trusted: Sequence[Text]
    benign: Sequence[Benign] = ()
    own: int = 0
    """trusted texts that the model itself wrote, the others are its parent's or somebody else's"""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all ids, in their order."""
        said = repr([(text.prompt, text.ids) for text in (*self.trusted, *(one.text for one in self.benign))])
        return hashlib.sha256(said.encode()).hexdigest()


def read_trusted(file: Path, policy: Policy) -> list[Text]:
    """JSONL of {"prompt", "text"}; UserError naming file and line of what is wrong."""
    return [_text(record, "text", policy) for record in _records([file])]


def read_pairs(file: Path, policy: Policy) -> list[Pair]:
    """JSONL of {"prompt", "chosen", "rejected"}; UserError naming file and line of what is wrong."""
    return [Pair(_text(one, "chosen", policy), _text(one, "rejected", policy)) for one in _records([file])]


def read_benign(place: Path, policy: Policy) -> list[Benign]:
    """JSONL of {"text"}, with a "prompt" or without; of a folder, all such files, each a domain by its name.

    A text without a prompt is read from its beginning to where the policy's context ends.
    """
    files = [path for path in sorted(place.iterdir()) if is_jsonl(path)] if place.is_dir() else [place]
    if not files:
        raise UserError(f"--benign {place}: holds no *.jsonl; give a JSON Lines file, or a folder of them")
    return [Benign(_benign(record, policy), file.stem) for file in files for record in _records([file])]


def split(count: int) -> tuple[list[int], list[int]]:
    """Which of ``count`` texts are learned from, and which measured on: all if there are too few to part with any."""
    measured = list(range(HELD_OUT - 1, count, HELD_OUT)) or list(range(count))
    return [n for n in range(count) if n not in {*measured}] or measured, measured


def _records(files: Sequence[Path]) -> list[Record]:
    found = records.read(files)
    if not found:
        raise UserError(f"{files[0]}: has no texts; give some")
    return found


def _text(record: Record, field: str, policy: Policy) -> Text:
    prompt = encode_prompt(policy, record.text("prompt")) or [policy.end]
    return _fitting(record, policy, Text(tuple(prompt), (*policy.encode(record.text(field)), policy.end)))


def _benign(record: Record, policy: Policy) -> Text:
    if "prompt" in record.fields:
        return _text(record, "text", policy)
    before = tuple(encode_prompt(policy, "")) or (policy.end,)
    ids = policy.encode(record.text("text"))[: policy.context - len(before)]
    if not ids:
        raise UserError(f"{record.place}: field 'text' is empty; remove the line")
    return Text(before, tuple(ids))


def _fitting(record: Record, policy: Policy, text: Text) -> Text:
    if (length := len(text.prompt) + len(text.ids)) > policy.context:
        raise UserError(f"{record.place}: takes {length} tokens, the model reads {policy.context}; shorten the line")
    return text
