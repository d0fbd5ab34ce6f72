"""llama.cpp's container GGUF (versions 2 and 3): metadata, and the location of each tensor.

The reader of the package ``gguf`` takes 20 times as long (1.6 s for 49,152 tokens and their merges, on every open) and
trusts the lengths in a file. Here each is checked against the file's size before it is read.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from planaria.common.errors import UserError

MAGIC = b"GGUF"
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""type code of a value → numpy type; 7 is bool"""
_TEXT, _ARRAY, _TRUTH = 8, 9, 7
_ALIGNED = 32
_MAX_SIDES = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the file, of ggml's type ``kind``."""

    shape: tuple[int, ...]
    """dimensions in PyTorch's order, rows first"""
    kind: int
    begin: int
    """offset of its first byte"""


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata and tensor locations."""

    path: Path
    size: int
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a file has the GGUF suffix or magic."""
    try:
        with path.open("rb") as file:
            return path.suffix == ".gguf" or file.read(4) == MAGIC
    except OSError:
        return False


def read_metadata(path: Path) -> GgufFile:
    """Read a file's metadata.

    :raises UserError: if it is unreadable, not GGUF, of another version, or damaged.
    """
    try:
        with path.open("rb") as file:
            return _Reader(file, path).read_file()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); use a GGUF file") from error
    except (ValueError, struct.error) as error:
        raise UserError(f"{path}: truncated or damaged GGUF file ({error}); download it again") from None


class _Reader:
    """Sequential reader; ValueError if the file ends before an announced length."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._at = 0
        self._size = os.fstat(file.fileno()).st_size

    def read_file(self) -> GgufFile:
        magic, version, tensors, pairs = struct.unpack("<4sIQQ", self._read_bytes(24))
        if magic != MAGIC:
            raise ValueError("it does not begin with GGUF")
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are read")
        self._require_room(pairs, 12)
        named = {self._read_text(): self._read_value(self._read_number("<u4")) for _ in range(pairs)}
        self._require_room(tensors, 24)
        entries = [self._read_tensor() for _ in range(tensors)]
        aligned = named.get("general.alignment", _ALIGNED)
        if type(aligned) is not int or not 0 < aligned <= 1 << 20:
            raise ValueError(f"general.alignment = {aligned!r}")
        start = -(-self._at // aligned) * aligned
        located = {name: GgufTensor(shape, kind, start + offset) for name, shape, kind, offset in entries}
        return GgufFile(self._path, self._size, named, located)

    def _read_bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > self._size:
            raise ValueError(f"it ends before byte {self._at}")
        return self._file.read(count)

    def _require_room(self, count: int, size: int) -> None:
        """Raise ValueError unless ``count`` entries of at least ``size`` bytes fit in the rest of the file."""
        if count * size > self._size - self._at:
            raise ValueError(f"{count} entries in {self._size - self._at} bytes")

    def _read_number(self, kind: str) -> int:
        return int(np.frombuffer(self._read_bytes(np.dtype(kind).itemsize), kind)[0])

    def _read_text(self) -> str:
        return self._read_bytes(self._read_number("<u8")).decode()

    def _read_value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._read_text()
        if kind == _ARRAY:
            return self._read_array(self._read_number("<u4"), self._read_number("<u8"))
        return self._read_array(kind, 1)[0]

    def _read_array(self, kind: int, count: int) -> list[Any]:
        if kind == _TEXT:
            self._require_room(count, 8)
            return [self._read_text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"a value of kind {kind}")
        numbers: Any = np.frombuffer(self._read_bytes(count * np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])
        return list((numbers != 0 if kind == _TRUTH else numbers).tolist())

    def _read_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, sides = self._read_text(), self._read_number("<u4")
        if not 0 < sides <= _MAX_SIDES:
            raise ValueError(f"{name!r} of {sides} dimensions")
        shape = tuple(reversed(self._read_array(10, sides)))
        kind, offset = self._read_number("<u4"), self._read_number("<u8")
        if 0 in shape:
            raise ValueError(f"{name!r} of shape {list(shape)}")
        return name, shape, kind, offset
