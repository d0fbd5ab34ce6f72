"""Sources at URLs: files of any file system that fsspec supports, streamed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from fsspec import AbstractFileSystem

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.common.filesystems import filesystem, require_reachable, without_password, wrap_errors

MAX_FILES = 1_000_000
MAX_TEXT = 1 << 28
"""maximum bytes of a text file, which is one document and is held in memory"""
SILENCE_S = 60.0
"""maximum wait for the next bytes of a web server; other protocols have their own"""
_VERSIONS = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
"""properties that change with a file; each file system reports some"""


@dataclass(frozen=True)
class RemoteFile:
    """The part of ``Path`` that reading a corpus needs."""

    system: AbstractFileSystem
    path: str
    url: str
    version: tuple[str, ...]
    """changes with the file, if its file system reports changes"""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return without_password(self.url)

    def open(self, mode: str) -> BinaryIO:
        """Open the file as a stream of bytes. Failures of opening or reading raise UserError."""
        with _read(self.url):
            return cast(BinaryIO, io.BufferedReader(_Stream(self.system.open(self.path, mode), self.url), 1 << 20))

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            content = documents.read_bounded(file, MAX_TEXT)
        if len(content) > MAX_TEXT:
            raise UserError(
                f"data.source: {self} has more than {MAX_TEXT >> 20} MiB, too many for one document; split it, or "
                "convert it to .jsonl"
            )
        return content


def remote_files(source: str) -> list[RemoteFile]:
    """Return the file at a URL, or all files below that folder by name, without hidden ones.

    :raises UserError: if it is unreachable or missing, or its protocol needs a missing package.
    """
    with _read(source):
        system, root = filesystem(source, "data.source", **_options(source))
        info = system.info(root)
        files = dict(_below(system, root)) if info["type"] == "directory" else {root: info}
    if len(files) > MAX_FILES:
        raise UserError(
            f"data.source = {without_password(source)!r} has more than {MAX_FILES} files; use a folder with fewer"
        )
    alone = list(files) == [root]
    return [
        RemoteFile(
            system,
            path,
            source if alone else system.unstrip_protocol(path),
            tuple(str(info.get(key, "")) for key in _VERSIONS),
        )
        for path, info in sorted(files.items())
    ]


@contextmanager
def _read(url: str) -> Iterator[None]:
    with require_reachable("data.source"), wrap_errors(url, "read it"):
        yield


def _below(system: AbstractFileSystem, root: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # Without "raise", unreadable folders would be skipped and the corpus silently changed.
    for folder, _, files in system.walk(root, detail=True, on_error="raise"):
        if not any(component.startswith(".") for component in folder.removeprefix(root).split("/")):
            yield from ((info["name"], info) for name, info in files.items() if name and not name.startswith("."))


def _options(source: str) -> dict[str, Any]:
    """Request whole files from web servers, as some do not serve ranges; only silence times out."""
    if not source.startswith(("http://", "https://")):
        return {}
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        return {}  # filesystem() names the package that is missing

    patience = ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    return {"block_size": 0, "client_kwargs": {"timeout": patience, "headers": {"Accept-Encoding": "identity"}}}


class _Stream(io.RawIOBase):
    """Bytes of an open file, with its name in errors."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(getattr(self._file, "seekable", bool)())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _read(self._url):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        with _read(self._url):
            received = self._file.read(len(buffer))
        buffer[: len(received)] = received
        return len(received)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
