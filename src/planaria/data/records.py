"""Texts from files of records: JSON Lines, JSON and Parquet. JSON may be compressed with gzip."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, cast

from planaria.common.errors import UserError, missing_package, suggestion
from planaria.data.remote import RemoteFile

MAX_LINE = 1 << 28
"""maximum size of a record in bytes; for JSON files, in characters"""
NONE: Mapping[str, str] = MappingProxyType({})
RecordFormat = Literal["lines", "json", "parquet"]
KINDS: Mapping[str, RecordFormat] = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".parquet": "parquet"}
"""file name suffix, in lower case → format; all but Parquet may be followed by .gz"""
_ROWS = 256
"""rows of a Parquet file in memory together"""
PIECE = 1 << 16
"""characters of a JSON file read together, or more if a record is longer"""
_BLANK = " \t\r\n"
REQUIRED = {"messages": ("messages",), "prompt": ("prompt", "completion")}
"""data.format → keys that its records must have"""
KEYS = {kind: (*keys, "tools", "chat_template_kwargs") for kind, keys in REQUIRED.items()}
"""data.format → keys that are read, with those that only chat templates get"""


class UnreadableFile(UserError):
    """A file without readable text. It is skipped in a folder and refused if it is the only file."""

    def __init__(self, path: object, reason: str, fix: str) -> None:
        super().__init__(f"{path}: {reason}; {fix}")
        self.reason = reason


def format_of(path: Path | RemoteFile) -> RecordFormat | None:
    """Return the record format of a file name, or None for other files."""
    name = path.name.lower()
    return next((kind for ending, kind in KINDS.items() if name.removesuffix(".gz").endswith(ending)), None)


def is_jsonl(path: Path | RemoteFile) -> bool:
    """Return whether a file name is of JSON Lines."""
    return format_of(path) == "lines"


Record = Mapping[str, object]


def read_records(path: Path | RemoteFile, field: str, where: Mapping[str, str] = NONE) -> Iterator[str]:
    """Yield ``field`` of every record of a file that has the values of ``where``, in the file's order.

    :raises UnreadableFile: before the first text, if a ``.json`` file does not begin with a record that has the field.
    :raises UserError: naming file and record, for damaged files, damaged records and records without text.
    """
    fix = "" if where else "set data.field, or convert the file to JSON Lines"
    for record, location in iter_checked_records(path, (field, *where), f"a field {field!r}", fix):
        if all(str(record.get(key)) == value for key, value in where.items()):
            yield record_text(record, field, location)


def iter_records(path: Path | RemoteFile, keys: Sequence[str]) -> Iterator[tuple[Record, str]]:
    """Yield every record of a file with its place, in the file's order.

    Of a Parquet file that has the first of ``keys``, only these are read.

    :raises UnreadableFile: before the first record, if a ``.json`` file does not begin with one.
    :raises UserError: naming file and record, for damaged files and damaged records.
    """
    kind = format_of(path)
    if kind == "parquet":
        return _read_parquet(path, keys)
    return _read_json(path) if kind == "json" else read_lines([path], MAX_LINE)


def iter_checked_records(
    path: Path | RemoteFile, keys: Sequence[str], label: str, fix: str
) -> Iterator[tuple[Record, str]]:
    """Yield :func:`iter_records`.

    :raises UnreadableFile: with ``fix``, unless that is empty, if a ``.json`` file does not begin with a record that
        has the first of ``keys``, which the message calls ``label``.
    """
    first = bool(fix) and format_of(path) == "json"
    for record, location in iter_records(path, keys):
        if first and keys[0] not in record:
            raise UnreadableFile(path, f"no records with {label} ({suggestion(keys[0], record)})", fix)
        first = False
        yield record, location


def record_text(record: Record, field: str, location: str) -> str:
    """Return the text of one record; ``location`` is its location in errors.

    :raises UserError: if there is none.
    """
    if field not in record:
        matching = next((kind for kind, keys in REQUIRED.items() if {*keys} <= record.keys()), None)
        fix = "set data.field" if matching is None else f"set data.field, or data.format = {matching!r} for dialogues"
        raise UserError(f"{location}: no field {field!r} ({suggestion(field, record)}); {fix}")
    value = record[field]
    if not isinstance(value, str):
        raise UserError(
            f"{location}: field {field!r} holds {type(value).__name__}, not text; set data.field or fix the record"
        )
    return without_surrogates(value)


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON's \\u escapes can spell and UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_lines(
    paths: Sequence[Path | RemoteFile], max_line: int, max_bytes: int = 1 << 62
) -> Iterator[tuple[Record, str]]:
    """Yield the records of JSON Lines files with their places, in order; skip blank lines.

    :raises UserError: naming file and line, for an unreadable file, a line that is no object or has more than
        ``max_line`` bytes, or more than ``max_bytes`` bytes in all.
    """
    left = max_bytes
    for path in paths:
        number = 0
        try:
            with _open(path) as lines:
                for number, line in enumerate(iter(partial(lines.readline, max_line + 1), b""), start=1):
                    location, left = f"{path}:{number}", left - len(line)
                    if len(line) > max_line:
                        raise UserError(f"{location}: more than {max_line >> 20} MiB, too many for a record; cut it")
                    if left < 0:
                        raise UserError(f"{location}: more than {max_bytes} bytes so far; remove some records")
                    if line.strip():
                        yield _record(line, location), location
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}:{number + 1}: unreadable ({error}); repair or remove the file") from error


def _read_json(path: Path | RemoteFile) -> Iterator[tuple[Record, str]]:
    """Yield the records of a JSON file: an array of objects, or concatenated objects."""
    number = 0
    try:
        with _open(path) as file:
            for number, record in enumerate(_iter_values(file), start=1):
                location = f"{path}, record {number}"
                if not isinstance(record, dict):
                    reason = f"a JSON {type(record).__name__}, not an object with the field of data.field"
                    if number == 1:
                        raise UnreadableFile(path, reason, "set data.field, or convert the file to JSON Lines")
                    raise UserError(f"{location}: {reason}")
                yield record, location
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        if not number:
            fix = "set data.field, or convert the file to JSON Lines"
            raise UnreadableFile(path, f"not JSON records ({error})", fix) from error
        raise UserError(f"{path}, record {number + 1}: not a JSON record ({error}); repair or remove it") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}, record {number + 1}: unreadable ({error}); repair or remove the file") from error


def _iter_values(file: BinaryIO) -> Iterator[object]:
    """Yield the elements of a JSON array, or concatenated values, with one value in memory at a time."""
    text = _Ahead(file)
    in_array = text.next() == "["
    if in_array:
        text.at += 1
    for number in range(1 << 62):
        mark = text.next()
        if in_array and mark == "]":
            text.at += 1
            if text.next():
                raise ValueError("text after the array")
            return
        if not mark:
            if in_array:
                raise ValueError("the array does not end")
            return
        if in_array and number:
            if mark != ",":
                raise ValueError("no comma between two elements")
            text.at += 1
            text.next()
        yield text.value()


class _Ahead:
    """A text read from a file on demand; ``at`` is the position in ``held``."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = io.TextIOWrapper(file, encoding="utf-8-sig")
        self._decoder = json.JSONDecoder()
        self.held = ""
        self.at = 0
        self._ended = False

    def next(self) -> str:
        """Skip white space and return the next character; empty at the end."""
        while True:
            while self.at < len(self.held) and self.held[self.at] in _BLANK:
                self.at += 1
            if self.at < len(self.held) or self._ended:
                return self.held[self.at : self.at + 1]
            self._read_more()

    def value(self) -> object:
        """Return the JSON value at the current position."""
        while True:
            try:
                decoded, self.at = self._decoder.raw_decode(self.held, self.at)
                return decoded
            except ValueError:  # possibly incomplete
                if self._ended:
                    raise
                if len(self.held) - self.at > MAX_LINE:
                    raise ValueError(f"more than {MAX_LINE >> 20} MiB, too many for a record") from None
                self._read_more()

    def _read_more(self) -> None:
        left = self.held[self.at :]
        piece = self._file.read(max(PIECE, len(left)))
        self.held = left + piece
        self.at = 0
        self._ended = not piece


def _read_parquet(path: Path | RemoteFile, keys: Sequence[str]) -> Iterator[tuple[Record, str]]:
    """Yield the records of a Parquet file with those of ``keys`` that it has, some rows at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_package(f"{path}: reading Parquet files", "pyarrow", "hub") from error
    number = 0
    try:
        with path.open("rb") as file:
            table = parquet.ParquetFile(file)
            names: list[str] = table.schema_arrow.names
            columns = [name for name in names if name in keys] if keys[0] in names else names
            for batch in table.iter_batches(_ROWS, columns=columns):
                for record in batch.to_pylist():
                    yield record, f"{path}, row {number}"
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}, row {number}: unreadable ({reason}); repair or remove the file") from error


@contextmanager
def _open(path: Path | RemoteFile) -> Iterator[BinaryIO]:
    with path.open("rb") as file:
        packed = path.name.lower().endswith(".gz")
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file


def _record(line: bytes, location: str) -> Record:
    try:
        record: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: not a JSON record ({error}); fix or remove the line") from error
    if not isinstance(record, dict):
        raise UserError(f"{location}: a JSON {type(record).__name__}, not an object; fix or remove the line")
    return record
