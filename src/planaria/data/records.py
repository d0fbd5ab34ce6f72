"""Texts from records: JSON Lines files, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, cast

from planaria.data.remote import RemoteFile
from planaria.errors import UserError, nearest

MOST_LINE = 1 << 28
"""bytes of a record"""


def is_jsonl(path: Path | RemoteFile) -> bool:
    """Whether a file's name says JSON Lines."""
    return path.name.endswith((".jsonl", ".jsonl.gz"))


NONE: Mapping[str, str] = MappingProxyType({})


def read_jsonl(path: Path | RemoteFile, field: str, where: Mapping[str, str] = NONE) -> Iterator[str]:
    """``field`` of every record of a JSON Lines file, in the file's order; blank lines are skipped.

    Only of records that have the values of ``where``, such as those with one label.

    Raises UserError naming ``file:line`` for lines that are not UTF-8, not JSON or not objects, for records without
    the field or with something else than text in it, for lines of more than ``MOST_LINE`` bytes, and for files that
    cannot be read to their end.
    """
    number = 0
    try:
        with _open(path) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE + 1), b""), start=1):
                place = f"{path}:{number}"
                if len(line) > MOST_LINE:
                    raise UserError(f"{place}: has more than {MOST_LINE >> 20} MiB, too many for a record; cut it")
                if line.strip():
                    record = _record(line, place)
                    if all(str(record.get(key)) == value for key, value in where.items()):
                        yield text_of(record, field, place)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}:{number + 1}: cannot be read ({error}); mend the file or remove it") from error


def text_of(record: Mapping[str, object], field: str, place: str) -> str:
    """The text of one record; ``place`` says in errors where the record stands. Raises UserError if there is none."""
    if field not in record:
        raise UserError(f"{place}: no field {field!r} ({nearest(field, record)}); set data.field")
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{place}: field {field!r} holds {type(value).__name__}, not text; set data.field or mend it")
    # JSON's \u escapes can spell half a surrogate pair, which is no character and has no UTF-8.
    return value.encode("utf-8", "replace").decode("utf-8")


@contextmanager
def _open(path: Path | RemoteFile) -> Iterator[BinaryIO]:
    with path.open("rb") as file:
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.name.endswith(".gz") else file


def _record(line: bytes, place: str) -> Mapping[str, object]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not a JSON record ({error}); mend or remove the line") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: holds a JSON {type(record).__name__}, not an object with the field of data.field")
    return record
