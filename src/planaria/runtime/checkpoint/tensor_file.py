"""Safetensors files, written and read one tensor at a time.

The library's writer holds the interpreter lock for the whole file, so that no other thread runs while a disk is slow.
Its reader maps the whole file: each tensor keeps all pages, truncation kills the process, and headers are unbounded.
The bytes are identical.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from planaria.models.packing import HEADROOM, PackingError, SafetensorsHeader, Spec, header_of, layout
from planaria.runtime.transport.wire import as_bytes, buffer

_PIECE = 1 << 20
"""bytes per read, which fit in a core's cache"""


def write(
    file: BinaryIO, specs: Mapping[str, Spec], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> bytes:
    """Write a file without holding the interpreter lock; return its bytes before the first tensor.

    :param read: returns a tensor of the specified type and shape just before it is written.
    :raises KeyError: if a tensor's type is not supported.
    :raises OSError: if the disk is full.
    """
    head, spans = layout(specs, metadata)
    _require_room(file, len(head) + max((end for _, end in spans.values()), default=0))
    file.write(head)
    for name in spans:
        file.write(as_bytes(read(name).contiguous()))
    return head


@dataclass(frozen=True)
class TensorFile:
    """An open file: its header, with sizes checked against the file, and its tensors."""

    header: SafetensorsHeader
    head: bytes
    """the file's start, as :func:`write` returns it"""
    _handle: int

    def tensor(self, name: str, seen: Callable[[memoryview], object] = lambda piece: None) -> Tensor:
        """Read a tensor; thread-safe for different tensors.

        :param seen: called with each piece of its bytes after it was read, while it is in a cache
        :raises KeyError: if there is no such tensor.
        :raises PackingError: if the file was truncated.
        :raises OSError: if the disk cannot be read.
        """
        dtype, shape = self.header.specs[name]
        tensor = buffer(dtype, shape, math.prod(shape) * dtype.itemsize)
        index, rest = len(self.head) + self.header.spans[name][0], as_bytes(tensor)
        while rest:
            count = self._read(name, rest[:_PIECE], index)
            seen(rest[:count])
            index, rest = index + count, rest[count:]
        return tensor

    def scan(self, name: str, seen: Callable[[memoryview], object]) -> int:
        """Pass a tensor's bytes to ``seen`` with one piece in memory at a time; return their count."""
        index, end = (len(self.head) + at for at in self.header.spans[name])
        size, room = end - index, memoryview(bytearray(min(_PIECE, end - index)))
        while index < end:
            count = self._read(name, room[: end - index], index)
            seen(room[:count])
            index += count
        return size

    def _read(self, name: str, room: memoryview, index: int) -> int:
        """Read bytes of a tensor from ``index`` of the file into ``room``; return their count, at least 1."""
        if not (count := os.preadv(self._handle, [room], index)):
            raise PackingError(f"{name!r}: the file ends before it does")
        return count


@contextmanager
def open_file(path: Path) -> Iterator[TensorFile]:
    """Open a file of :func:`write` or the library.

    :raises PackingError: if the header is invalid, too long, or does not match the file's length.
    :raises OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        size, first = os.fstat(file.fileno()).st_size, file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 0 < length <= min(size - 8, HEADROOM):
            raise PackingError(f"a file of {size} bytes cannot have a header of {length}")
        text = file.read(length)
        header = _parse_header(text, size - 8 - length)
        yield TensorFile(header, first + text, file.fileno())


@lru_cache(maxsize=8)
def _parse_header(text: bytes, size: int) -> SafetensorsHeader:
    """Parse and validate a header; cached, because files are opened once per tensor.

    :raises PackingError: unless the tensors follow each other without gaps and fill ``size`` bytes.
    """
    header, end = header_of(text), 0
    for name, (begin, after) in sorted(header.spans.items(), key=lambda entry: entry[1]):
        dtype, shape = header.specs[name]
        if begin != end or after - begin != math.prod(shape) * dtype.itemsize:
            raise PackingError(f"{name!r} spans bytes {begin} to {after}, which does not match {list(shape)}")
        end = after
    if end != size:
        raise PackingError(f"the header announces {end} bytes of tensors, the file has {size}")
    return header


def _require_room(file: BinaryIO, size: int) -> None:
    """Reject a file that does not fit, which would take space from the run's log.

    :raises OSError: if the disk has fewer bytes left.
    """
    disk = os.fstatvfs(file.fileno())
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and disk.f_bavail * disk.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
