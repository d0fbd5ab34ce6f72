"""Problems from JSON Lines files, plain or gzipped, with bounded size and errors that name file and line."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import pydantic

from planaria.common.errors import UserError, suggestion
from planaria.data.records import is_jsonl, read_lines, without_surrogates

MAX_BYTES = 64 << 20
MAX_LINE_BYTES = 1 << 20
Field = Annotated[str, pydantic.Field(min_length=1, max_length=200)]
"""field specification as read by :meth:`TaskRecord.joined_text`"""


@dataclass(frozen=True)
class TaskRecord:
    """One line's object and its place for error messages."""

    location: str
    fields: Mapping[str, object]

    def joined_text(self, spec: str) -> str:
        """Return the texts of fields joined by spaces, as in "Body+Question".

        "a.b" is field b of field a, "a.0" the first item of a list. Numbers are written out: 8.0 is 8, 1e3 is 1000.

        :raises UserError: if a field is missing, or is neither text nor a number.
        """
        parts = [spec] if spec in self.fields else spec.split("+")  # a field's name may contain a plus
        return " ".join(self._field_text(part) for part in parts)

    def value_at(self, spec: str) -> object:
        """Return the value of a single field, or None if it is missing or ``spec`` names several."""
        result: object = self.fields
        for name in [spec] if spec in self.fields else spec.split("."):
            result = _member(result, name)
        return result

    def text(self, field: str) -> str:
        """Return the text of a field; UserError if it has none."""
        if field not in self.fields:
            raise UserError(
                f"{self.location}: no field {field!r} ({suggestion(field, self.fields)}); fix or remove the line"
            )
        value = self.fields[field]
        if not isinstance(value, str):
            raise UserError(f"{self.location}: field {field!r} holds {type(value).__name__}, not text; fix the line")
        return without_surrogates(value)

    def _field_text(self, spec: str) -> str:
        result = self.value_at(spec)
        if result is None:
            first = spec.partition(".")[0]
            fields = [first] if first in self.fields else self.fields
            raise UserError(f"{self.location}: no field {spec!r} ({suggestion(spec, fields)}); fix or remove the line")
        if isinstance(result, str):
            return without_surrogates(result)
        if isinstance(result, int | float) and not isinstance(result, bool) and (number := plain_digits(result)):
            return number
        kind = type(result).__name__
        raise UserError(f"{self.location}: field {spec!r} holds {kind}, neither text nor a number; fix the line")


def plain_digits(number: float) -> str:
    """Return a number in plain digits without trailing zeros, or an empty string if it is not finite."""
    if isinstance(number, int):
        return str(number)
    if not math.isfinite(number):
        return ""
    digits = format(Decimal(repr(number)), "f")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _member(container: object, name: str) -> object:
    if isinstance(container, Mapping):
        return container.get(name)
    if isinstance(container, list) and name.isdecimal() and int(name) < len(container):
        return container[int(name)]
    return None


def read_split(path: Path) -> tuple[list[TaskRecord], list[TaskRecord]]:
    """Return the training and held-out records of a file, or of a folder with train*.jsonl and optionally test*.jsonl.

    Without test files the last tenth is held out, at least one record.

    :raises UserError: for missing, oversized (64 MiB in all, 1 MiB a line) or invalid files, or an empty part.
    """
    if path.is_dir():
        files = [p for p in sorted(path.iterdir()) if is_jsonl(p)]
        train, test = ([p for p in files if p.name.startswith(kind)] for kind in ("train", "test"))
    else:
        train, test = [path], []
    if not train:
        raise UserError(f"{path}: contains no train*.jsonl; use a JSON Lines file, or a folder with such a file")
    training, held_out = read(train), read(test)
    if not test:
        cut = len(training) - max(1, len(training) // 10)
        training, held_out = training[: max(cut, 0)], training[max(cut, 0) :]
    if not training or not held_out:
        raise UserError(f"{path}: too few problems, {len(training)} to train on and {len(held_out)} held out; add some")
    return training, held_out


def read(paths: Sequence[Path]) -> list[TaskRecord]:
    """Return all records of some files, in order; UserError as in :func:`read_split`."""
    return [TaskRecord(location, fields) for fields, location in read_lines(paths, MAX_LINE_BYTES, MAX_BYTES)]


def fingerprint(kind: str, parts: Iterable[str]) -> str:
    """Return 16 hex digits of the parts of a task's problems and scores, in order."""
    digest = hashlib.blake2b(kind.encode(), digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
