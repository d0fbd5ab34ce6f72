"""Logs that grow for months: the newest lines in a plain file, older ones in numbered, compressed segments.

A reserve of disk space keeps room for the last lines of a log when the disk is full.
"""

from __future__ import annotations

import errno
import gzip
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

from planaria.common import atomic, documents
from planaria.common.errors import UserError

FOLDER = "segments"
FULL = 1 << 20
"""bytes of lines in a segment; about 600 steps of five workers"""
LONGEST_LINE = 16 << 20
LARGEST = FULL + LONGEST_LINE
"""bytes that a segment may inflate to: only its last line may go beyond what is full"""


class Line(NamedTuple):
    """A whole line of a log, without its end, and where it stands."""

    file: Path
    number: int
    text: bytes


class Place(NamedTuple):
    """A place between two lines of a log, at which reading can go on."""

    segments: int
    """that are before it"""
    tail: int
    """bytes of the lines after them"""
    lines: int
    """as many as there are in these bytes"""


START = Place(0, 0, 0)


class Mark(NamedTuple):
    """How far a log goes, at one moment."""

    segments: int
    tail: int
    """bytes of the lines after them"""

    @property
    def size(self) -> int:
        """Bytes of all lines, about."""
        return self.segments * FULL + self.tail


def packed(path: Path, number: int) -> Path:
    """The compressed segment of the log ``path``."""
    return path.parent / FOLDER / f"{path.stem}-{number:06}{path.suffix}.gz"


def plain(path: Path, number: int) -> Path:
    """The same before it is compressed."""
    return packed(path, number).with_suffix("")


def numbers(path: Path, suffix: str) -> set[int]:
    """Of the segments there are of the log ``path``, with names that end so."""
    names = (file.name for file in (path.parent / FOLDER).glob(f"{path.stem}-*{path.suffix}{suffix}"))
    digits = (name.removeprefix(f"{path.stem}-").removesuffix(path.suffix + suffix) for name in names)
    return {int(number) for number in digits if number.isascii() and number.isdigit() and len(number) < 12}


def mark(path: Path) -> Mark:
    """How far the log ``path`` goes now, also while it is being written."""
    segments = max(numbers(path, ".gz") | numbers(path, ""), default=0)
    while True:
        try:
            tail = path.stat().st_size
        except FileNotFoundError:
            tail = 0
        # Has the file that was just measured become a segment? Then what counts is the file after it.
        if not (packed(path, segments + 1).exists() or plain(path, segments + 1).exists()):
            return Mark(segments, tail)
        segments += 1


def read(path: Path, upto: Mark) -> Iterator[Line]:
    """The whole lines of the log ``path`` up to a mark, in order; a line that is torn off at the end is left out.

    :raises UserError: naming a segment that is missing or damaged, or a line that is too long.
    """
    return (line for _, line in read_on(path, upto, START))


def read_on(path: Path, upto: Mark, since: Place) -> Iterator[tuple[Place, Line]]:
    """As :func:`read`, from a place on: each line with the place after it."""
    for number in range(since.segments + 1, upto.segments + 1):
        found = _segment(path, number)
        if found is None:
            raise UserError(f"{packed(path, number)}: missing; without it the log has a gap: bring it back")
        yield from _whole(*found, LARGEST, True, _within(since, number))
    try:
        last: tuple[Path, BinaryIO] | None = path, path.open("rb")
    except FileNotFoundError:
        last = None
    # Opened first and asked then: whatever became a segment before it was opened is found by its name.
    last = _segment(path, upto.segments + 1) or last
    if last is not None:
        yield from _whole(*last, upto.tail, False, _within(since, upto.segments + 1))


def _within(since: Place, number: int) -> Place:
    """The place in the segment of this number at which to begin: its start, if ``since`` is not in it."""
    return since if since.segments + 1 == number else Place(number - 1, 0, 0)


def _segment(path: Path, number: int) -> tuple[Path, BinaryIO] | None:
    """The segment of this number, opened; None if there is none. It may be compressed just now: hence three looks."""
    for file in (packed(path, number), plain(path, number), packed(path, number)):
        try:
            opened = file.open("rb")
        except FileNotFoundError:
            continue
        if file.suffix != ".gz":
            return file, opened
        with opened:
            return file, BytesIO(_inflated(file, documents.bounded(opened, LARGEST)))
    return None


def _inflated(file: Path, data: bytes) -> bytes:
    """What is in a compressed segment, which proves itself by its checksum."""
    reader = zlib.decompressobj(wbits=31)
    try:
        found = reader.decompress(data, LARGEST + 1)
    except zlib.error as error:
        raise UserError(f"{file}: damaged ({error}); bring back a copy of it") from None
    if len(found) > LARGEST or len(data) > LARGEST:
        raise UserError(f"{file}: holds more than {LARGEST >> 20} MB, so it is no segment of a log; remove it")
    if not reader.eof or reader.unused_data:
        raise UserError(f"{file}: damaged (not one whole gzip stream); bring back a copy of it")
    return found


def _whole(file: Path, opened: BinaryIO, size: int, closed: bool, since: Place) -> Iterator[tuple[Place, Line]]:
    """The whole lines within the first ``size`` bytes from ``since`` on; what is ``closed`` must have no other."""
    with opened:
        end = opened.seek(since.tail)
        for number in count(since.lines + 1):
            text = opened.readline(LONGEST_LINE + 1)
            end += len(text)
            if len(text) > LONGEST_LINE:
                raise UserError(f"{file}:{number}: longer than {LONGEST_LINE >> 20} MB, so no line of a log; remove it")
            if closed and text and not text.endswith(b"\n"):
                raise UserError(f"{file}:{number}: torn off; bring back a copy of the file")
            if not text.endswith(b"\n") or (end > size and not closed):
                return
            yield Place(since.segments, end, number), Line(file, number, text[:-1])


class Rotated:
    """Appends lines to the log ``path``. A line is with the operating system when :meth:`write` returns.

    Compression is a thread's affair: who writes waits for a rename at most.
    """

    def __init__(self, path: Path, full: int = FULL) -> None:
        """Makes the log, or goes on with it: a line that an earlier crash tore off is cut away first."""
        self._path, self._full = path, full
        for unfinished in (path.parent / FOLDER).glob(f".{path.stem}-*"):
            unfinished.unlink()
        self._number = max(numbers(path, ".gz") | numbers(path, ""), default=0)
        """of the last segment"""
        self._packing: threading.Thread | None = None
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()
        self._pack()

    def write(self, line: str) -> None:
        """Append a line.

        :raises OSError: naming the file; nothing of the line is in the log then, and the next one may be tried.
        """
        data = line.encode() + b"\n"
        try:
            if self._size and self._size + len(data) > self._full:
                self._begin_anew()
            self._append(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Everything that was full is compressed when this returns, if the disk lets it."""
        self._file.close()
        if self._packing is not None:
            self._packing.join()
        self._pack()
        if self._packing is not None:
            self._packing.join()

    def _append(self, data: bytes) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was removed while the run was training", str(self._path))
        rest = data
        try:
            while rest:  # a nearly full disk takes a part
                rest = rest[self._file.write(rest) :]
        except OSError:
            if len(rest) < len(data):
                self._file.truncate(self._size)  # the next line must not be glued to a part of this one
            raise
        self._size += len(data)

    def _begin_anew(self) -> None:
        """What there is becomes a segment. Where no new file can be begun, all stays as it was."""
        segment = plain(self._path, self._number + 1)
        segment.parent.mkdir(exist_ok=True)
        self._path.rename(segment)
        try:
            new = self._path.open("ab", buffering=0)
        except OSError:
            segment.rename(self._path)
            raise
        self._file.close()
        self._file, self._size = new, 0
        self._number += 1
        self._pack()

    def _pack(self) -> None:
        """Compress what is full, beside the run; while that is under way, the next call will find the rest."""
        if (self._packing is None or not self._packing.is_alive()) and numbers(self._path, ""):
            self._packing = threading.Thread(target=pack, args=(self._path,), name=f"pack {self._path.stem}")
            self._packing.start()


def pack(path: Path) -> None:
    """Compress the full segments of the log ``path``, each whole or not at all."""
    try:
        for number in sorted(numbers(path, "")):
            full = plain(path, number)
            if number not in numbers(path, ".gz"):
                if full.stat().st_size > LARGEST:  # a log of old, in one file: too much to be read back at once
                    continue
                with atomic.replacing(packed(path, number)) as unfinished, unfinished.open("wb") as file:
                    file.write(gzip.compress(full.read_bytes(), mtime=0))
                    file.flush()
                    os.fsync(file.fileno())
            full.unlink()
    except OSError:
        return  # what is plain is read as well, and is tried again when the next segment is full


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        with path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, end - LONGEST_LINE))
            file.truncate(start + file.read().rfind(b"\n") + 1)


BYTES = 256 << 10
"""some hundred lines: what is told while a run comes to its next whole step, and is saved"""


class Reserve:
    """A file of :data:`BYTES` in ``folder``, as long as there is room for it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".reserve"
        try:
            with self._path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, BYTES)
        except OSError:
            self.release()

    def release(self) -> None:
        """Give the room back."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
