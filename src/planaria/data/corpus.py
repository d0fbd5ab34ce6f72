"""The documents of a corpus, in an order that depends on the corpus only."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from planaria.common.errors import UserError, missing_package, suggestion
from planaria.common.filesystems import is_url
from planaria.config.data_config import Format
from planaria.config.names import expand_home
from planaria.config.schema import DataConfig
from planaria.data.listing import LOCAL, STDLIB, Passed, list_files
from planaria.data.records import (
    KEYS,
    REQUIRED,
    Record,
    UnreadableFile,
    format_of,
    iter_checked_records,
    iter_records,
    read_records,
    record_text,
    without_surrogates,
)
from planaria.data.remote import RemoteFile, remote_files

NAMED = 8
"""maximum number of names in a message about skipped files"""
PREFIX = "hf:"
Item = TypeVar("Item")


@contextmanager
def rename_source_errors(name: str) -> Iterator[None]:
    """Rename the source in errors to that of the mixture; "" is a single source."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise UserError(
            re.sub(r"\bdata\.(source|field|max_chars)\b", rf"data.mixture.{name}.\1", str(error))
        ) from error


def iter_documents(config: DataConfig, on_progress: Callable[[str], None] | None = None) -> Iterator[str]:
    """Yield the texts of ``config.source``; files by name, records in file order.

    Yield at most ``config.max_chars`` characters; the last text is cut there, and nothing is read beyond it. Blank
    documents are skipped. In a folder, files without readable text and hidden files are skipped; ``on_progress``
    receives their names and the reasons.

    :raises UserError: for a source that is missing, unreadable or empty, and for invalid records, possibly after some
        texts.
    """
    characters = 0
    max_characters = config.max_chars
    passed = defaultdict[str, list[str]](list)
    for text in _iter_texts(config, passed):
        if text and not text.isspace():
            piece = text if max_characters is None else text[: max_characters - characters]
            characters += len(piece)
            yield piece
        if characters == max_characters:
            return
    _report_skipped(config, passed, "" if characters else "UTF-8 text", on_progress)


def iter_source_records(
    config: DataConfig, on_progress: Callable[[str], None] | None = None
) -> Iterator[tuple[Record, str]]:
    """Yield the records of a source of dialogues with their places; files by name, records in file order.

    Records end with the one that exceeds ``config.max_chars`` characters. In a folder, files without records are
    skipped.

    :raises UserError: for a source that is missing, unreadable or empty, and for damaged records.
    """
    characters = 0
    passed = defaultdict[str, list[str]](list)
    empty = True
    for record, location in _iter_records(config, passed):
        yield record, location
        empty = False
        if config.max_chars is not None:
            characters += sum(map(len, _iter_strings(record, KEYS[config.format])))
            if characters >= config.max_chars:
                return
    _report_skipped(config, passed, "records" if empty else "", on_progress)


def resolve_formats(config: DataConfig) -> DataConfig:
    """Return ``config`` with the formats that 'auto' means for local files: dialogues, if their first record is one.

    Packed dialogues are masked from each other.
    """
    if config.mixture:
        sources = config.sources
        mixture = {
            name: source_config.model_copy(update={"format": _format(sources[name])})
            for name, source_config in config.mixture.items()
        }
        config = config.model_copy(update={"mixture": mixture})
    else:
        config = config.model_copy(update={"format": _format(config)})
    return DataConfig.model_validate(config.model_dump(exclude_unset=True)) if config.dialogues else config


def _format(config: DataConfig) -> Format:
    """Return the format of one source; 'auto' if it is text, or not local."""
    if config.format != "auto" or not is_local(config.source):
        return config.format
    if not expand_home(config.source.removeprefix(LOCAL)).exists():
        return "auto"
    try:
        root, names = list_files(config, {})
        for file in (root / name for name in names if format_of(root / name) is not None):
            with suppress(UnreadableFile):
                first, _ = next(iter_records(file, KEYS["messages"]), ({}, ""))
                if isinstance(first.get("messages"), list):
                    return "messages"
                if config.field in first:
                    return "auto"
                if {*REQUIRED["prompt"]} <= first.keys():
                    return "prompt"
    except UserError:  # reported when the text is read
        pass
    return "auto"


def iter_file_documents(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of one file without the empty ones.

    :raises UserError: naming the file, if it is unreadable or not text.
    """
    yield from (text for text in _read_texts(path, field) if text and not text.isspace())


def fingerprint(config: DataConfig) -> str:
    """Return the SHA-256 (hex) of the facts that determine the corpus, without reading it.

    Files are identified by paths, names, sizes and modification times, and the standard library by Python's version
    too. Files at a URL are identified by the facts by which their file system reports changes. A dataset of the hub is
    identified by its name.

    :raises UserError: if the source is missing.
    """
    facts: list[object] = [config.source, config.field]
    if _is_remote(config.source):
        facts += [[file.url, *file.version, *_legacy_format(file)] for file in remote_files(config.source)]
    elif not _is_hub(config.source):
        root, names = list_files(config, {})
        facts = [str(root.resolve()), config.field, platform.python_version() if config.source == STDLIB else ""]
        for name in names:
            status = (root / name).stat()
            facts.append([name, status.st_size, status.st_mtime_ns, *_legacy_format(root / name)])
    if config.max_chars is not None:
        facts.append(config.max_chars)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _legacy_format(path: Path | RemoteFile) -> list[str]:
    """Return the format of files that earlier versions read as text, so that they are prepared again."""
    kind = format_of(path)
    return [] if kind is None or path.name.endswith((".jsonl", ".jsonl.gz")) else [kind]


def may_exceed(config: DataConfig, characters: int) -> bool:
    """Return whether a document may have more than ``characters``, without reading any.

    :raises UserError: if the source is missing.
    """
    if config.max_chars is not None and config.max_chars <= characters:
        return False
    if not is_local(config.source):
        return True
    root, names = list_files(config, {})
    return any((root / name).stat().st_size > characters or name.endswith((".gz", ".parquet")) for name in names)


def _iter_texts(config: DataConfig, passed: Passed) -> Iterator[str]:
    """Yield all texts, empty ones included; record skipped files in ``passed``."""
    if config.dialogues:
        for record, _ in _iter_records(config, passed):
            yield "\n".join(_iter_strings(record, KEYS[config.format]))
    elif _is_hub(config.source):
        for record, location in read_hub(config.source, [config.field]):
            yield record_text(record, config.field, location)
    else:
        yield from _read_files(config, passed, lambda file: _read_texts(file, config.field))


def _iter_records(config: DataConfig, passed: Passed) -> Iterator[tuple[Record, str]]:
    """Yield all records with their places; record skipped files in ``passed``."""
    keys = KEYS[config.format]
    if _is_hub(config.source):
        yield from _without_nulls(read_hub(config.source, keys))
        return

    def of_file(file: Path | RemoteFile) -> Iterator[tuple[Record, str]]:
        if format_of(file) is None:
            raise UnreadableFile(file, "not a file of records", "use a .jsonl, .json or .parquet file")
        rows = iter_checked_records(file, keys, repr(keys[0]), "fix the records, or set data.format")
        return _without_nulls(rows) if format_of(file) == "parquet" else rows

    yield from _read_files(config, passed, of_file)


def _without_nulls(rows: Iterator[tuple[Record, str]]) -> Iterator[tuple[Record, str]]:
    """Yield the rows of a table without null fields within: each object there has the fields of all others."""

    def dense(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: dense(inner) for key, inner in value.items() if inner is not None or key == "content"}
        return [dense(inner) for inner in value] if isinstance(value, list) else value

    for record, location in rows:
        yield {key: dense(value) for key, value in record.items()}, location


def _read_files(
    config: DataConfig, passed: Passed, read: Callable[[Path | RemoteFile], Iterator[Item]]
) -> Iterator[Item]:
    """Yield what ``read`` yields of each file of the corpus."""
    files = _corpus_files(config, passed)
    for name, file in files.items():
        try:
            yield from read(file)
        except UnreadableFile as error:
            if len(files) == 1:
                raise UserError(f"data.source: {error}") from None
            passed[error.reason].append(name)


def _iter_strings(record: Record, keys: Sequence[str]) -> Iterator[str]:
    """Yield all texts in the values of a record's ``keys``, without the keys and roles of messages."""
    left = [record[key] for key in reversed(keys) if key in record]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield without_surrogates(value)
        elif isinstance(value, Mapping):
            left += [inner for key, inner in reversed([*value.items()]) if key != "role"]
        elif isinstance(value, list):
            left += reversed(value)


def _report_skipped(
    config: DataConfig, passed: Passed, missing: str, on_progress: Callable[[str], None] | None
) -> None:
    """Report the skipped files, one line per reason with the first names.

    :raises UserError: with these lines, if the source lacks all content: ``missing``.
    """
    lines = []
    for reason, names in passed.items():
        first = [name if name.isprintable() else ascii(name) for name in sorted(names)[:NAMED]]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        lines.append(f"skipped {', '.join(first)}{more}: {reason}")
    if missing:
        why = "".join(f"; {line}" for line in lines)
        raise UserError(f"data.source = {config.source!r} holds no {missing}; use a file or folder that does{why}")
    if on_progress:
        for line in lines:
            on_progress(line)


def is_local(source: str) -> bool:
    """Return whether a source is on this machine, not at a URL or on the Hub."""
    return not (_is_hub(source) or _is_remote(source))


def _is_remote(source: str) -> bool:
    return is_url(source) and not source.startswith(LOCAL)


def _is_hub(source: str) -> bool:
    return source.startswith(PREFIX) and not is_url(source)


def _corpus_files(config: DataConfig, passed: Passed) -> Mapping[str, Path | RemoteFile]:
    if _is_remote(config.source):
        return {str(file): file for file in remote_files(config.source)}
    root, names = list_files(config, passed)
    return {name: root / name for name in names}


def _read_texts(path: Path | RemoteFile, field: str) -> Iterator[str]:
    """Yield a file's texts, empty ones included."""
    if format_of(path) is None:
        yield _read(path)
    else:
        yield from read_records(path, field)


def _read(path: Path | RemoteFile) -> str:
    """Return a file's text with its line ends. UnreadableFile if it is binary or in another encoding."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"data.source: cannot read {path} ({error.strerror}); change its permissions") from error
    try:
        if b"\0" not in raw:
            return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    raise UnreadableFile(path, "not UTF-8 text", "convert it, or name a text file or a file of records")


def read_hub(source: str, keys: Sequence[str]) -> Iterator[tuple[Record, str]]:
    """Yield every row of the split "train" of ``source``, 'hf:NAME' or 'hf:NAME:CONFIG', with its place.

    Only those of ``keys`` that the dataset has are read; it must have the first.

    The dataset is streamed, not stored.

    :raises UserError: if the package is missing, the dataset or its configuration is unknown or unreachable, or the
        field is missing.
    """
    name, _, configuration = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise UserError(f"data.source = {source!r} names no dataset; use 'hf:NAME' or 'hf:NAME:CONFIG'")
    try:
        import datasets
    except ImportError as error:
        raise missing_package(f"data.source = {source!r}", "datasets", "hub") from error
    with _load_remote(source):
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        columns = rows.column_names  # None if only the rows have them
    if columns is not None and keys[0] not in columns:
        fix = "set data.field, or data.format for dialogues"
        raise UserError(f"data.source = {source!r}: no field {keys[0]!r} ({suggestion(keys[0], columns)}); {fix}")
    with _load_remote(source):
        wanted = None if columns is None else [key for key in keys if key in columns]
        left = iter(rows if wanted is None else rows.select_columns(wanted))
    for number in count():
        with _load_remote(source):
            row = next(left, None)
        if row is None:
            return
        yield row, f"{source}, row {number}"


@contextmanager
def _load_remote(source: str) -> Iterator[None]:
    """Turn any failure of the package, or of those that it uses, into a UserError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"data.source = {source!r}: cannot load it ({reason}); check the name and the network, or use local files"
        ) from error
