"""A folder or object store that several machines share, through fsspec: bounded reads, and files that are created once.

Failed calls are retried. A missing or existing file is a result, not a failure.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from planaria.common import atomic, documents
from planaria.common.errors import RunStopped, UserError
from planaria.common.filesystems import filesystem, without_password

_ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_FOREIGN = (("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError"))
"""connection errors of s3fs that are not an OSError; resolved only if s3fs is installed"""
_LONGEST_PAUSE_S = 15.0
CONCURRENT_READS = 16
"""concurrent reads of an object store, and the number of unchecked messages in memory"""
NOT_READABLE = "not readable"
T = TypeVar("T")


class BadObject(Exception):
    """A file of a store is missing, invalid or not the expected one.

    ``reason`` is a short phrase that contains no text of the writer except a field name.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StoreUnreachable(RunStopped):
    """A store failed on every try."""

    def __init__(self, location: str, call: str, tries: int, last: Exception) -> None:
        super().__init__(f"{location}: {call} failed {tries} times, last with {type(last).__name__}: {last}")
        self.tries = tries
        self.last = last


@dataclass(frozen=True)
class Retry:
    """Retry policy of a failing call. It does not bound a call that never returns."""

    tries: int = 6
    seconds: float = 60.0
    """no try starts after this time"""
    first_s: float = 0.5
    """pause before the second try; doubles, ± 50 %, up to 15 s"""


class Store:
    """A location on fsspec; paths are relative to it and trusted."""

    def __init__(
        self,
        url: str,
        setting: str,
        retry: Retry,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """:param setting: name of the user's setting or argument with the ``url``, for errors
        :raises UserError: if the location is not supported.
        """
        self.location = without_password(url)
        self._retry = retry
        self._clock = clock
        self._sleep = sleep
        if "::" in url:
            raise UserError(
                f"{setting}: {self.location}: chained file systems are not supported; use the store's own URL"
            )
        self._system, root = self._try("opening", lambda: filesystem(url, setting))
        self._local = isinstance(self._system, LocalFileSystem)
        protocol = self._system.protocol
        protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self._objects = bool(self._system.async_impl) and not {"http", "https"} & protocols
        """object store: no folders, and reads return at most the requested range"""
        self._root = os.path.realpath(root) if self._local else root.rstrip("/")

    def read(self, path: str, max_bytes: int) -> bytes | None:
        """Return the content of ``path``, or None if there is no file.

        :raises BadObject: "not a file", "not readable", or "oversized" if it has more than ``max_bytes`` bytes.
        """
        act = self._read_file if self._local else self._read_object
        try:
            data = self._try("reading", lambda: act(f"{self._root}/{path}", max_bytes))
        except FileNotFoundError:
            return None
        except (IsADirectoryError, NotADirectoryError):
            raise BadObject("not a file") from None
        if len(data) > max_bytes:
            raise BadObject("oversized")
        return data

    def read_each(self, paths: Sequence[str], max_bytes: int) -> Iterator[bytes | BadObject | None]:
        """Read each path as :meth:`read` does; errors are returned. Object stores are read concurrently."""
        if not self._objects:
            yield from (self._read_or_error(path, max_bytes) for path in paths)
            return
        for first in range(0, len(paths), CONCURRENT_READS):
            batch = paths[first : first + CONCURRENT_READS]
            positions = [f"{self._root}/{path}" for path in batch]
            ask = functools.partial(self._system.cat_ranges, positions, 0, max_bytes + 1, on_error="return")
            for path, answer in zip(batch, self._try("reading", ask), strict=True):
                yield self._answer(path, answer, max_bytes)

    def _answer(self, path: str, answer: bytes | Exception, max_bytes: int) -> bytes | BadObject | None:
        """Convert one result of a concurrent read; retry a failed one."""
        if isinstance(answer, FileNotFoundError):
            return None
        if isinstance(answer, Exception):
            return self._read_or_error(path, max_bytes)
        return BadObject("oversized") if len(answer) > max_bytes else bytes(answer)

    def _read_or_error(self, path: str, max_bytes: int) -> bytes | BadObject | None:
        try:
            return self.read(path, max_bytes)
        except BadObject as error:
            return error

    def write(self, path: str, data: bytes) -> bool:
        """Write ``data`` to ``path``; return False, without writing, if a file is there.

        :raises UserError: if a folder of the path cannot be created.
        """
        act = self._write_file if self._local else self._write_object
        try:
            return self._try("writing", lambda: act(f"{self._root}/{path}", data))
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise UserError(f"{self.location} does not exist and cannot be created here; create it first") from None
        except (IsADirectoryError, NotADirectoryError) as error:
            raise UserError(f"{self.location}: {path} cannot be written; remove the obstacle ({error})") from None

    def replace(self, path: str, data: bytes) -> None:
        """Write ``data`` to ``path``, whether or not a file is there; readers see the old or the new content.

        :raises UserError: if it cannot be written there.
        """
        act = self._replace_file if self._local else self._replace_object
        try:
            self._try("writing", lambda: act(f"{self._root}/{path}", data))
        except _ANSWERS as error:
            raise UserError(f"{self.location}: {path} cannot be written; remove the obstacle ({error})") from None

    def creates_once(self, path: str) -> bool:
        """Return whether the store itself keeps a file from being created twice, also by two concurrent writers."""
        if not self._local:
            return bool(self._system.async_impl) and self._try("writing", lambda: self._is_conditional(path))
        folder = Path(self._root, path).parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            link = f"{file.name}.link"
            try:
                os.link(file.name, link)
                os.link(file.name, link)
            except FileExistsError:
                return True
            except OSError:
                return False  # without hard links
            finally:
                Path(link).unlink(missing_ok=True)
        return False

    def _is_conditional(self, path: str) -> bool:
        self._system.pipe_file(f"{self._root}/{path}", b"1", mode="create")
        try:
            self._system.pipe_file(f"{self._root}/{path}", b"2", mode="create")
        except FileExistsError:
            return True
        return False

    def folders(self, path: str, pattern: re.Pattern[str]) -> list[str]:
        """Return the names of folders in ``path`` that match ``pattern`` fully; links are ignored."""
        act = self._list_folder if self._local else self._list_prefix
        try:
            return self._try("listing", lambda: act(f"{self._root}/{path}", pattern))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _try(self, call: str, act: Callable[[], T]) -> T:
        began, pause = self._clock(), self._retry.first_s
        tries = 1
        while True:
            try:
                return act()
            except _ANSWERS:
                raise
            except _failures() as error:
                wait = pause * random.uniform(0.5, 1.5)
                if tries >= self._retry.tries or self._clock() + wait - began > self._retry.seconds:
                    raise StoreUnreachable(self.location, call, tries, error) from error
            self._sleep(wait)
            pause, tries = min(2 * pause, _LONGEST_PAUSE_S / 1.5), tries + 1

    def _read_file(self, path: str, max_bytes: int) -> bytes:
        """Read a regular file; follow no links and open no devices, which untrusted peers may have created."""
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or os.path.realpath(path) != path:
                raise BadObject("not a file")
            if status.st_size > max_bytes:
                raise BadObject("oversized")
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                return documents.read_bounded(file, max_bytes)
        except PermissionError:
            raise BadObject(NOT_READABLE) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise BadObject("not a file") from None
            raise

    def _read_object(self, path: str, max_bytes: int) -> bytes:
        """Read an object with one request; on other systems check its type and size first."""
        try:
            if not self._objects:
                info = self._info(path)
                if info["type"] != "file":
                    raise BadObject("not a file")
                if (info.get("size") or 0) > max_bytes:
                    raise BadObject("oversized")
            return bytes(self._system.cat_file(path, start=0, end=max_bytes + 1))
        except PermissionError:
            raise BadObject(NOT_READABLE) from None
        except _ANSWERS:
            raise
        except OSError:
            if self._info(path).get("size") == 0:  # an empty object has no range
                return b""
            raise

    def _info(self, path: str) -> dict[str, Any]:
        self._system.invalidate_cache()
        return self._system.info(path)  # type: ignore[no-any-return]

    def _write_file(self, path: str, data: bytes) -> bool:
        folder = Path(path).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(error.errno, "not a folder", str(folder)) from None
        if os.path.realpath(folder) != str(folder):
            raise NotADirectoryError(errno.ELOOP, "a link", str(folder))
        return atomic.write_new(Path(path), data, 0o666)

    def _write_object(self, path: str, data: bytes) -> bool:
        """Create an object unless one exists.

        The prior read covers stores without conditional writes, and failed writes that did arrive.
        """
        try:
            self._read_object(path, 0)
            return False
        except FileNotFoundError:
            pass
        except BadObject as error:
            if error.reason != NOT_READABLE:  # some stores deny access to missing objects
                return False
        if not self._system.async_impl:  # async stores have no folders, or would create a bucket for a misspelt name
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._system.pipe_file(path, data, mode="create")
        return True

    def _replace_file(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(Path(path), data)

    def _replace_object(self, path: str, data: bytes) -> None:
        if not self._system.async_impl:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._system.pipe_file(path, data)

    def _list_folder(self, path: str, pattern: re.Pattern[str]) -> list[str]:
        if os.path.realpath(path) != path:
            return []
        with os.scandir(path) as entries:
            return [e.name for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]

    def _list_prefix(self, path: str, pattern: re.Pattern[str]) -> list[str]:
        self._system.invalidate_cache()
        entries = self._system.ls(path, detail=True)
        names = {e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"}
        return [name for name in names if pattern.fullmatch(name)]


def _failures() -> tuple[type[Exception], ...]:
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in _FOREIGN)
    return (OSError, *(kind for kind in loaded if kind is not None))
