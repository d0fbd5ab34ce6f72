"""Writes a log of lines that never grows large: what is full becomes a compressed segment (``record/segments.py``)."""

from __future__ import annotations

import errno
import gzip
import os
import threading
from pathlib import Path

from planaria.common import atomic
from planaria.record.segments import FOLDER, FULL, LARGEST, LONGEST_LINE, numbers, packed, plain


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
