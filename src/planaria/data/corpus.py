"""What is read: the documents of a corpus, in an order that never changes while the corpus does not."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NoReturn

from planaria.config import DataConfig
from planaria.data.cache import cache_folder
from planaria.data.hub import PREFIX, read_hub
from planaria.data.records import is_jsonl, read_jsonl
from planaria.data.remote import RemoteFile, remote_files
from planaria.errors import UserError
from planaria.filesystems import is_url

STDLIB, LOCAL = "stdlib", "file://"
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"})
"""folders below the standard library's that hold tests, other people's code, or no source at all"""


@contextmanager
def of_source(name: str) -> Iterator[None]:
    """What is wrong with a source is said of that of the mixture; "" is the name of a single one."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise UserError(re.sub(r"\bdata\.(source|field|most)\b", rf"data.mixture.{name}.\1", str(error))) from error


def documents(config: DataConfig, on_progress: Callable[[str], None] | None = None) -> Iterator[str]:
    """The texts of ``config.source``; files in the order of their names, records in the order of their file.

    No more than ``config.most`` characters of them; the last one is cut there, and nothing is read beyond it.
    Documents without anything but white space are left out. In a folder, hidden files and folders are passed over;
    files that are not UTF-8 text are too, and ``on_progress`` is told how many. Raises UserError (at the first or a
    later document) for a source that is missing, unreadable or empty, and for bad records.
    """
    found, most = 0, config.most
    for text in _texts(config, on_progress):
        if text and not text.isspace():
            part = text if most is None else text[: most - found]
            found += len(part)
            yield part
        if found == most:
            return
    if not found:
        raise UserError(f"data.source = {config.source!r} holds no UTF-8 text; name a file or folder that does")


def file_documents(path: Path, field: str) -> Iterator[str]:
    """The texts of one file of several, without empty ones; nothing of a file that is not UTF-8 text."""
    return (text for text in _of_file(path, field) or () if text and not text.isspace())


def fingerprint(config: DataConfig) -> str:
    """SHA-256 (hex) over what determines the corpus, without reading it.

    For files: where they are, their names, sizes and times of change; for the standard library Python's version too.
    For files at a URL: what their file system says that changes with them. A dataset of the hub counts as unchanging
    under its name. Raises UserError if the source is missing.
    """
    facts: list[object] = [config.source, config.field]
    if _is_remote(config.source):
        facts += [[file.url, *file.version] for file in remote_files(config.source)]
    elif not config.source.startswith(PREFIX):
        root, names = _listing(config)
        facts = [str(root.resolve()), config.field, platform.python_version() if config.source == STDLIB else ""]
        for name in names:
            status = (root / name).stat()
            facts.append([name, status.st_size, status.st_mtime_ns])
    if config.most is not None:
        facts.append(config.most)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _texts(config: DataConfig, on_progress: Callable[[str], None] | None) -> Iterator[str]:
    """All texts, empty ones included."""
    if not _is_remote(config.source) and config.source.startswith(PREFIX):
        yield from read_hub(config.source, config.field)
        return
    files, skipped = _files(config), 0
    for file in files:
        if (found := _of_file(file, config.field)) is not None:
            yield from found
        else:
            skipped += 1
    if skipped and len(files) == 1:
        raise UserError(f"data.source: {files[0]} is not UTF-8 text; convert it, or name a text or .jsonl file")
    if skipped and on_progress:
        on_progress(f"passed over {skipped} of {len(files)} files that are not UTF-8 text")


def _is_remote(source: str) -> bool:
    return is_url(source) and not source.startswith(LOCAL)


def _files(config: DataConfig) -> Sequence[Path | RemoteFile]:
    if _is_remote(config.source):
        return remote_files(config.source)
    root, names = _listing(config)
    return [root / name for name in names]


def _of_file(path: Path | RemoteFile, field: str) -> Iterator[str] | None:
    """A file's texts, empty ones included; None if it is not UTF-8 text."""
    if is_jsonl(path):
        return read_jsonl(path, field)
    text = _read(path)
    return None if text is None else iter((text,))


def _read(path: Path | RemoteFile) -> str | None:
    """A file's text; None if it is binary or in another encoding. Line ends stay as they are."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"data.source: cannot read {path} ({error.strerror}); mend its permissions") from error
    if b"\0" in raw:
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _listing(config: DataConfig) -> tuple[Path, list[str]]:
    """The corpus's files: a folder, and the sorted names of the files below it."""
    path, cache = Path(config.source.removeprefix(LOCAL)).expanduser(), cache_folder(config).resolve()
    try:
        if config.source == STDLIB:
            path = Path(sysconfig.get_paths()["stdlib"])
            return path, [name for name in _walk(path, _not_stdlib) if name.endswith(".py")]
        if path.is_dir():
            # What we write ourselves must not become part of what we read.
            return path, _walk(path, lambda folder: folder.resolve() == cache)
        if path.is_file():
            return path.parent, [path.name]
        if not path.exists():
            _missing(config.source, path)
    except OSError as error:
        raise UserError(
            f"data.source = {config.source!r}: cannot read {error.filename} ({error.strerror}); mend its permissions"
        ) from error
    raise UserError(f"data.source = {config.source!r} is neither a file nor a folder; name one that is")


def _not_stdlib(folder: Path) -> bool:
    return folder.name in NOT_STDLIB


def _walk(root: Path, leave_out: Callable[[Path], bool]) -> list[str]:
    """Names of all files below ``root`` relative to it, sorted; nothing hidden, no folder that is to be left out."""

    def refuse(error: OSError) -> None:
        raise error  # os.walk would pass over what it cannot read, and the corpus would silently be another one

    names = []
    for folder, below, files in os.walk(root, onerror=refuse):
        here = Path(folder)
        below[:] = [name for name in below if not name.startswith(".") and not leave_out(here / name)]
        paths = (here / name for name in files if not name.startswith("."))
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def _missing(source: str, path: Path) -> NoReturn:
    """Refuse a path that is not there, naming what is there instead."""
    while not path.parent.is_dir():
        path = path.parent
    there = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
    close = difflib.get_close_matches(path.name, [*there, STDLIB], n=1, cutoff=0.5)
    some = ", ".join(islice(there, 6)) + (", …" if len(there) > 6 else "")
    hint = f"did you mean {close[0]!r}?" if close else f"known there: {some or 'nothing'}"
    raise UserError(f"data.source = {source!r}: there is no {path.name!r} in {path.parent.resolve()}; {hint}")
