"""Problems from JSON Lines files, plain or gzipped: read whole, within bounds, with errors that name file and line."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from planaria.data.records import is_jsonl
from planaria.errors import UserError, nearest

MAX_BYTES = 64 << 20
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Record:
    """One line's object, and where it stands, for errors."""

    place: str
    fields: Mapping[str, object]

    def text(self, field: str) -> str:
        """The text of a field; UserError when there is none."""
        if field not in self.fields:
            raise UserError(
                f"{self.place}: no field {field!r} ({nearest(field, self.fields)}); mend or remove the line"
            )
        value = self.fields[field]
        if not isinstance(value, str):
            raise UserError(f"{self.place}: field {field!r} holds {type(value).__name__}, not text; mend the line")
        return whole(value)


def whole(text: str) -> str:
    """A text without halves of surrogate pairs, which JSON can spell but which are no characters."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_split(path: Path) -> tuple[list[Record], list[Record]]:
    """The training and the held-out records of a file, or of a folder with train*.jsonl and, perhaps, test*.jsonl.

    Without test files the last tenth is held out, one record at least. Raises UserError for what is missing, too large
    (64 MiB in all, 1 MiB a line), no JSON Lines, or leaves either part empty.
    """
    if path.is_dir():
        files = [p for p in sorted(path.iterdir()) if is_jsonl(p)]
        train, test = ([p for p in files if p.name.startswith(kind)] for kind in ("train", "test"))
    else:
        train, test = [path], []
    if not train:
        raise UserError(f"{path}: holds no train*.jsonl; give a JSON Lines file, or a folder with one of that name")
    training, held_out = read(train), read(test)
    if not test:
        cut = len(training) - max(1, len(training) // 10)
        training, held_out = training[: max(cut, 0)], training[max(cut, 0) :]
    if not training or not held_out:
        raise UserError(f"{path}: too few problems, {len(training)} to train on and {len(held_out)} held out; add some")
    return training, held_out


def read(paths: Iterable[Path]) -> list[Record]:
    """All records of some files, in order; UserError as in :func:`read_split`."""
    records: list[Record] = []
    left = MAX_BYTES
    for path in paths:
        number = 0
        try:
            with _open(path) as lines:
                while line := lines.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    left -= len(line)
                    _bound(len(line), left, f"{path}:{number}")
                    if line.strip():
                        records.append(_record(line, f"{path}:{number}"))
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}:{number + 1}: cannot be read ({error}); mend the file or its name") from error
    return records


def fingerprint(kind: str, parts: Iterable[str]) -> str:
    """16 hex digits of all that a task's problems and scores are made of, in order."""
    digest = hashlib.blake2b(kind.encode(), digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else path.open("rb")


def _bound(line: int, left: int, place: str) -> None:
    if line > MAX_LINE_BYTES:
        raise UserError(f"{place}: longer than {MAX_LINE_BYTES} bytes; remove the line, or give a JSON Lines file")
    if left < 0:
        raise UserError(f"{place}: more than {MAX_BYTES} bytes so far; give fewer problems")


def _record(line: bytes, place: str) -> Record:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not a JSON record ({error}); mend or remove the line") from error
    if not isinstance(fields, dict):
        raise UserError(f"{place}: holds a JSON {type(fields).__name__}, not an object; mend or remove the line")
    return Record(place, fields)
