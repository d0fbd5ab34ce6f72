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
from itertools import count, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from planaria.common import atomic, documents
from planaria.common.errors import UserError

FOLDER = "segments"
SEGMENT_BYTES = 1 << 20
"""bytes per segment; about 600 steps of five workers"""
LONGEST_LINE = 16 << 20
LARGEST = SEGMENT_BYTES + LONGEST_LINE
"""maximum bytes of an inflated segment: only its last line may exceed the limit"""


class LogPosition(NamedTuple):
    """A position between two lines of a log, from which reading can continue."""

    segments: int
    """number of segments before it"""
    tail: int
    """bytes of the lines after them"""
    lines: int
    """number of lines in these bytes"""


START = LogPosition(0, 0, 0)


class LogLine(NamedTuple):
    """A complete line of a log, without its newline, and its location."""

    file: Path
    number: int
    text: bytes
    end: LogPosition
    """position after the line"""


class LogEnd(NamedTuple):
    """The end of a log at one moment."""

    segments: int
    tail: int
    """bytes of the lines after the segments"""

    @property
    def size(self) -> int:
        """Approximate bytes of all lines."""
        return self.segments * SEGMENT_BYTES + self.tail


def packed(path: Path, number: int) -> Path:
    """Return the path of the compressed segment of the log ``path``."""
    return path.parent / FOLDER / f"{path.stem}-{number:06}{path.suffix}.gz"


def uncompressed_path(path: Path, number: int) -> Path:
    """Return the path of the segment before compression."""
    return packed(path, number).with_suffix("")


def segment_numbers(path: Path, suffix: str) -> set[int]:
    """Return the numbers of the log's segments with this suffix."""
    names = (file.name for file in (path.parent / FOLDER).glob(f"{path.stem}-*{path.suffix}{suffix}"))
    digits = (name.removeprefix(f"{path.stem}-").removesuffix(path.suffix + suffix) for name in names)
    return {int(number) for number in digits if number.isascii() and number.isdigit() and len(number) < 12}


def _last_segment(path: Path) -> int:
    return max(segment_numbers(path, ".gz") | segment_numbers(path, ""), default=0)


def end_of_log(path: Path) -> LogEnd:
    """Return the current end of the log ``path``, also during writes."""
    segments = _last_segment(path)
    while True:
        try:
            tail = path.stat().st_size
        except FileNotFoundError:
            tail = 0
        # If the measured file has become a segment meanwhile, measure the next one.
        if not (packed(path, segments + 1).exists() or uncompressed_path(path, segments + 1).exists()):
            return LogEnd(segments, tail)
        segments += 1


def read(path: Path, upto: LogEnd, since: LogPosition = START) -> Iterator[LogLine]:
    """Yield the complete lines of the log ``path`` after a position, up to a mark, without an incomplete last line.

    :raises UserError: naming a missing or damaged segment, or a line that is too long.
    """
    for number in range(since.segments + 1, upto.segments + 1):
        segment = _segment(path, number)
        if segment is None:
            raise UserError(f"{packed(path, number)}: missing, so the log has a gap; restore it from a backup")
        yield from _complete_lines(*segment, LARGEST, _within(since, number), closed=True)
    try:
        last: tuple[Path, BinaryIO] | None = path, path.open("rb")
    except FileNotFoundError:
        last = None
    # Opened first, then checked: a file that became a segment before it was opened is found by its name.
    last = _segment(path, upto.segments + 1) or last
    if last is not None:
        yield from _complete_lines(*last, upto.tail, _within(since, upto.segments + 1), closed=False)


def _within(since: LogPosition, number: int) -> LogPosition:
    """Return the position at which to start in this segment: its start if ``since`` is in another one."""
    return since if since.segments + 1 == number else LogPosition(number - 1, 0, 0)


def _segment(path: Path, number: int) -> tuple[Path, BinaryIO] | None:
    """Open the segment of this number; None if there is none. Three attempts, as compression may replace it."""
    for file in (packed(path, number), uncompressed_path(path, number), packed(path, number)):
        try:
            opened = file.open("rb")
        except FileNotFoundError:
            continue
        if file.suffix != ".gz":
            return file, opened
        with opened:
            return file, BytesIO(_inflate(file, documents.read_bounded(opened, LARGEST)))
    return None


def _inflate(file: Path, compressed: bytes) -> bytes:
    """Return the content of a compressed segment, verified by its checksum."""
    reader = zlib.decompressobj(wbits=31)
    try:
        content = reader.decompress(compressed, LARGEST + 1)
    except zlib.error as error:
        raise UserError(f"{file}: damaged ({error}); restore it from a copy") from None
    if len(content) > LARGEST or len(compressed) > LARGEST:
        raise UserError(f"{file} holds more than {LARGEST >> 20} MB, so it is not a segment of a log; remove it")
    if not reader.eof or reader.unused_data:
        raise UserError(f"{file}: damaged (not a complete gzip stream); restore it from a copy")
    return content


def _complete_lines(file: Path, opened: BinaryIO, size: int, since: LogPosition, *, closed: bool) -> Iterator[LogLine]:
    """Yield the complete lines within the first ``size`` bytes after ``since``; a ``closed`` segment must have no
    others."""
    with opened:
        end = opened.seek(since.tail)
        for number in count(since.lines + 1):
            text = opened.readline(LONGEST_LINE + 1)
            end += len(text)
            if len(text) > LONGEST_LINE:
                raise UserError(f"{file}:{number}: over {LONGEST_LINE >> 20} MB, so it is not a log line; remove it")
            if closed and text and not text.endswith(b"\n"):
                raise UserError(f"{file}:{number}: truncated line; restore the file from a copy")
            if not text.endswith(b"\n") or (end > size and not closed):
                return
            yield LogLine(file, number, text[:-1], LogPosition(since.segments, end, number))


class RotatingLog:
    """Appends lines to the log ``path``. When :meth:`write` returns, the operating system has the line.

    A thread compresses segments; the writer waits at most for a rename.
    """

    def __init__(self, path: Path, full: int = SEGMENT_BYTES) -> None:
        """Create or reopen the log; a line truncated by an earlier crash is removed."""
        self._path, self._full = path, full
        for unfinished in (path.parent / FOLDER).glob(f".{path.stem}-*"):
            unfinished.unlink()
        self._number = _last_segment(path)
        """number of the last segment"""
        self._packing: threading.Thread | None = None
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()
        self._pack()

    def write(self, line: str) -> None:
        """Append a line.

        :raises OSError: naming the file; the log then contains no part of the line, and the write may be retried.
        """
        encoded = line.encode() + b"\n"
        try:
            if self._size and self._size + len(encoded) > self._full:
                self._rotate()
            self._append(encoded)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Return after all full segments are compressed, if the disk permits."""
        self._file.close()
        if self._packing is not None:
            self._packing.join()
        self._pack()
        if self._packing is not None:
            self._packing.join()

    def _append(self, encoded: bytes) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was removed while the run was training", str(self._path))
        rest = encoded
        try:
            while rest:  # a nearly full disk takes a part
                rest = rest[self._file.write(rest) :]
        except OSError:
            if len(rest) < len(encoded):
                self._file.truncate(self._size)  # the next line must not be appended to a fragment
            raise
        self._size += len(encoded)

    def _rotate(self) -> None:
        """Turn the current file into a segment. If no new file can be created, keep appending."""
        segment = uncompressed_path(self._path, self._number + 1)
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
        """Compress full segments in a thread; if one is running, the next call handles the rest."""
        if (self._packing is None or not self._packing.is_alive()) and segment_numbers(self._path, ""):
            self._packing = threading.Thread(target=pack, args=(self._path,), name=f"pack {self._path.stem}")
            self._packing.start()


def pack(path: Path) -> None:
    """Compress the full segments of the log ``path``, each atomically."""
    try:
        for number in sorted(segment_numbers(path, "")):
            full = uncompressed_path(path, number)
            if number not in segment_numbers(path, ".gz"):
                if full.stat().st_size > LARGEST:  # one large file of an older version: too large to inflate whole
                    continue
                with atomic.replace_atomically(packed(path, number)) as unfinished, unfinished.open("wb") as file:
                    file.write(gzip.compress(full.read_bytes(), mtime=0))
                    file.flush()
                    os.fsync(file.fileno())
            full.unlink()
    except OSError:
        return  # uncompressed segments are readable; retried when the next segment is full


def keep_first(path: Path, lines: int) -> None:
    """Remove all lines of the log ``path`` after its first ``lines``; no process may write to it.

    :raises UserError: as :func:`read`.
    """
    end = end_of_log(path)
    ends = (line.end for line in read(path, end))
    kept = next(islice(ends, lines - 1, None), None) if lines else START
    if kept is None:  # it is shorter
        return
    if kept.segments == end.segments:
        if path.exists():
            os.truncate(path, kept.tail)
        return
    segment = _segment(path, kept.segments + 1)
    assert segment is not None, "it was read"
    with segment[1] as file:
        atomic.write_bytes(path, file.read(kept.tail))
    for number in range(kept.segments + 1, end.segments + 1):
        for part in (packed(path, number), uncompressed_path(path, number)):
            part.unlink(missing_ok=True)


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        with path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, end - LONGEST_LINE))
            file.truncate(start + file.read().rfind(b"\n") + 1)


RESERVE_BYTES = 256 << 10
"""a few hundred lines: enough for a run to reach its next complete step and save"""


class DiskReserve:
    """A file of :data:`RESERVE_BYTES` in ``folder``, while there is room for it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".reserve"
        try:
            with self._path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError:
            self.release()

    def release(self) -> None:
        """Remove the reserve file, so that its space can be used for the log."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
