"""The documents of a corpus, in an order that depends on the corpus only."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import NoReturn

from planaria.common.cache import cache_folder
from planaria.common.errors import UserError, missing_package, nearest
from planaria.common.filesystems import is_url
from planaria.config.names import expanded
from planaria.config.schema import DataConfig
from planaria.data.records import PassedOver, kind_of, read_records, text_of
from planaria.data.remote import RemoteFile, remote_files

STDLIB, LOCAL = "stdlib", "file://"
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"})
"""folders in the standard library's that hold tests, third-party code, or no source"""
NAMED = 8
"""maximum number of names in a message about skipped files"""
Passed = dict[str, list[str]]
"""reason → skipped files and folders"""
PREFIX = "hf:"


@contextmanager
def of_source(name: str) -> Iterator[None]:
    """Rename the source in errors to that of the mixture; "" is a single source."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise UserError(re.sub(r"\bdata\.(source|field|most)\b", rf"data.mixture.{name}.\1", str(error))) from error


def documents(config: DataConfig, on_progress: Callable[[str], None] | None = None) -> Iterator[str]:
    """Yield the texts of ``config.source``; files by name, records in file order.

    Yield at most ``config.most`` characters; the last text is cut there, and nothing is read beyond it. Blank documents
    are skipped. In a folder, files without readable text and hidden files are skipped; ``on_progress`` receives their
    names and the reasons.

    :raises UserError: for a source that is missing, unreadable or empty, and for invalid records, possibly after some
        texts.
    """
    found, most, passed = 0, config.most, defaultdict[str, list[str]](list)
    for text in _texts(config, passed):
        if text and not text.isspace():
            part = text if most is None else text[: most - found]
            found += len(part)
            yield part
        if found == most:
            return
    lines = _lines(passed)
    if not found:
        why = "".join(f"; {line}" for line in lines)
        raise UserError(f"data.source = {config.source!r} holds no UTF-8 text; name a file or folder that does{why}")
    if on_progress:
        for line in lines:
            on_progress(line)


def file_documents(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of one file without the empty ones.

    :raises UserError: naming the file, if it is unreadable or not text.
    """
    yield from (text for text in _of_file(path, field) if text and not text.isspace())


def fingerprint(config: DataConfig) -> str:
    """Return the SHA-256 (hex) of the facts that determine the corpus, without reading it.

    For files: paths, names, sizes and modification times; for the standard library Python's version too. For files at a
    URL: the facts by which their file system reports changes. A dataset of the hub is identified by its name.

    :raises UserError: if the source is missing.
    """
    facts: list[object] = [config.source, config.field]
    if _is_remote(config.source):
        facts += [[file.url, *file.version, *_how(file)] for file in remote_files(config.source)]
    elif not config.source.startswith(PREFIX):
        root, names = _listing(config, {})
        facts = [str(root.resolve()), config.field, platform.python_version() if config.source == STDLIB else ""]
        for name in names:
            status = (root / name).stat()
            facts.append([name, status.st_size, status.st_mtime_ns, *_how(root / name)])
    if config.most is not None:
        facts.append(config.most)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _how(path: Path | RemoteFile) -> list[str]:
    """Return the format of files that earlier versions read as text, so that they are prepared again."""
    kind = kind_of(path)
    return [] if kind is None or path.name.endswith((".jsonl", ".jsonl.gz")) else [kind]


def may_exceed(config: DataConfig, characters: int) -> bool:
    """Return whether a document may have more than ``characters``, without reading any.

    :raises UserError: if the source is missing.
    """
    if config.most is not None and config.most <= characters:
        return False
    if _is_remote(config.source) or config.source.startswith(PREFIX):
        return True
    root, names = _listing(config, {})
    return any((root / name).stat().st_size > characters or name.endswith((".gz", ".parquet")) for name in names)


def _texts(config: DataConfig, passed: Passed) -> Iterator[str]:
    """Yield all texts, empty ones included; record skipped files in ``passed``."""
    if not _is_remote(config.source) and config.source.startswith(PREFIX):
        yield from read_hub(config.source, config.field)
        return
    files = _files(config, passed)
    for name, file in files.items():
        try:
            yield from _of_file(file, config.field)
        except PassedOver as error:
            if len(files) == 1:
                raise UserError(f"data.source: {error}") from None
            passed[error.reason].append(name)


def _lines(passed: Mapping[str, list[str]]) -> list[str]:
    """Return one line per reason, with the first names."""
    lines = []
    for reason, names in passed.items():
        first = [name if name.isprintable() else ascii(name) for name in sorted(names)[:NAMED]]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        lines.append(f"skipped {', '.join(first)}{more}: {reason}")
    return lines


def _is_remote(source: str) -> bool:
    return is_url(source) and not source.startswith(LOCAL)


def _files(config: DataConfig, passed: Passed) -> Mapping[str, Path | RemoteFile]:
    """Return the files of the corpus by name, in order."""
    if _is_remote(config.source):
        return {str(file): file for file in remote_files(config.source)}
    root, names = _listing(config, passed)
    return {name: root / name for name in names}


def _of_file(path: Path | RemoteFile, field: str) -> Iterator[str]:
    """Yield a file's texts, empty ones included."""
    if kind_of(path) is None:
        yield _read(path)
    else:
        yield from read_records(path, field)


def _read(path: Path | RemoteFile) -> str:
    """Return a file's text with its line ends. PassedOver if it is binary or in another encoding."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"data.source: cannot read {path} ({error.strerror}); change its permissions") from error
    try:
        if b"\0" not in raw:
            return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    raise PassedOver(path, "not UTF-8 text", "convert it, or name a text file or a file of records")


def _listing(config: DataConfig, passed: Passed) -> tuple[Path, list[str]]:
    """Return the corpus's folder and the sorted names of the files below it."""
    path, cache = expanded(config.source.removeprefix(LOCAL)), cache_folder(config.cache).resolve()
    try:
        if config.source == STDLIB:
            path = Path(sysconfig.get_paths()["stdlib"])
            return path, [name for name in _walk(path, _not_stdlib) if name.endswith(".py")]
        if path.is_dir():
            # Prepared data must not become part of the corpus.
            return path, _walk(path, lambda folder: folder.resolve() == cache, passed)
        if path.is_file():
            return path.parent, [path.name]
        if not path.exists():
            _missing(config.source, path)
    except OSError as error:
        raise UserError(
            f"data.source = {config.source!r}: cannot read {error.filename} ({error.strerror}); change its permissions"
        ) from error
    raise UserError(f"data.source = {config.source!r} is neither a file nor a folder; name one that is")


def _not_stdlib(folder: Path) -> bool:
    return folder.name in NOT_STDLIB


def _walk(root: Path, leave_out: Callable[[Path], bool], passed: Passed | None = None) -> list[str]:
    """Return the sorted relative names of all files below ``root``, except hidden ones and folders in ``leave_out``.

    With ``passed``, follow links to folders, read each folder once, and record skipped paths.
    """

    def refuse(error: OSError) -> None:
        raise error  # os.walk would skip unreadable folders and silently change the corpus

    def skip(path: Path, reason: str) -> None:
        if passed is not None:
            passed.setdefault(reason, []).append(path.relative_to(root).as_posix())

    names, seen, waiting = list[str](), set[tuple[int, int]](), [root]
    while waiting:  # links come last, so that a folder with both has its name without a link
        for folder, below, files in os.walk(waiting.pop(0), onerror=refuse):
            here, status = Path(folder), Path(folder).stat()
            if (status.st_dev, status.st_ino) in seen:
                skip(here, "a link to a folder that is read already")
                below.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            for path in [here / name for name in sorted(below)]:
                if (hidden := path.name.startswith(".")) or leave_out(path):
                    skip(path, "hidden" if hidden else "prepared data (data.cache)")
                    below.remove(path.name)
                elif passed is not None and path.is_symlink():
                    waiting.append(path)
            for path in [here / name for name in files]:
                if why := _unread(path):
                    skip(path, why)
                else:
                    names.append(path.relative_to(root).as_posix())
    return sorted(names)


def _unread(path: Path) -> str:
    """Return why a file of a folder is skipped; empty if it is read."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_file():
        return ""
    return "a broken link" if path.is_symlink() else "not a regular file"


def _missing(source: str, path: Path) -> NoReturn:
    """Refuse a missing path, suggesting existing names."""
    while not path.parent.is_dir():
        path = path.parent
    there = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
    close = difflib.get_close_matches(path.name, [*there, STDLIB], n=1, cutoff=0.5)
    some = ", ".join(islice(there, 6)) + (", …" if len(there) > 6 else "")
    hint = f"did you mean {close[0]!r}?" if close else f"known there: {some or 'nothing'}"
    raise UserError(f"data.source = {source!r}: there is no {path.name!r} in {path.parent.resolve()}; {hint}")


def read_hub(source: str, field: str) -> Iterator[str]:
    """Yield ``field`` of every row of the split "train" of ``source``, 'hf:NAME' or 'hf:NAME:CONFIG'.

    The dataset is streamed, not stored.

    :raises UserError: if the package is missing, the dataset or its configuration is unknown or unreachable, or the
        field is missing.
    """
    name, _, configuration = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise UserError(f"data.source = {source!r} names no dataset; write 'hf:NAME' or 'hf:NAME:CONFIG'")
    try:
        import datasets
    except ImportError as error:
        raise missing_package(f"data.source = {source!r}", "datasets", "hub") from error
    with _loaded(source):
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        columns = rows.column_names  # None if only the rows have them
    if columns is not None and field not in columns:
        raise UserError(f"data.source = {source!r}: no field {field!r} ({nearest(field, columns)}); set data.field")
    with _loaded(source):
        left = iter(rows if columns is None else rows.select_columns([field]))
    for number in count():
        with _loaded(source):
            row = next(left, None)
        if row is None:
            return
        yield text_of(row, field, f"{source}, row {number}")


@contextmanager
def _loaded(source: str) -> Iterator[None]:
    """Turn any failure of the package, or of those that it uses, into a UserError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"data.source = {source!r}: cannot load it ({reason}); check the name and the network, or give local files"
        ) from error
