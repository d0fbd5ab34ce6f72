"""The frame that precedes every tensor on an edge: who it belongs to, and exactly how large it is.

128 bytes, little endian, no pickle. Whatever a header claims is checked against what the receiver expects before a
single byte of payload is accepted.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass

import torch

HEADER_BYTES = 128
MAX_DIMS = 4
_LAYOUT = struct.Struct("<4sBBBB I i i i i 4Q Q d")
_MAGIC = b"PLNR"
_VERSION = 1
_DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16, 3: torch.int64, 4: torch.uint8}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class WireError(Exception):
    """A frame is malformed, or larger than the edge allows."""


class Content(enum.IntEnum):
    """What a frame carries."""

    FORWARD = 0
    BACKWARD = 1
    STATE = 2
    BYE = 3
    PARCEL = 4
    SHARE = 5
    PREFETCHED = 6
    BLOCKING = 7


_CONTENTS = frozenset(Content)


@dataclass(frozen=True)
class Header:
    """A frame's label. ``sent_at`` is the sender's monotonic clock in seconds (used by emulated links only)."""

    content: Content
    generation: int
    step: int
    microbatch: int
    hop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    sent_at: float = 0.0

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def pack(header: Header) -> bytes:
    """The header as :data:`HEADER_BYTES` bytes."""
    if len(header.shape) > MAX_DIMS:
        raise WireError(f"a tensor of {len(header.shape)} dimensions does not fit a frame (at most {MAX_DIMS})")
    if header.dtype not in _CODES:
        raise WireError(f"dtype {header.dtype} does not travel on edges")
    shape = header.shape + (0,) * (MAX_DIMS - len(header.shape))
    packed = _LAYOUT.pack(
        _MAGIC,
        _VERSION,
        header.content,
        _CODES[header.dtype],
        len(header.shape),
        header.generation,
        header.step,
        header.microbatch,
        header.hop,
        0,
        *shape,
        header.nbytes,
        header.sent_at,
    )
    return packed.ljust(HEADER_BYTES, b"\0")


def unpack(raw: bytes | bytearray, max_bytes: int) -> Header:
    """The header in ``raw``; WireError if it is malformed or announces more than ``max_bytes``."""
    magic, version, content, code, dims, generation, step, microbatch, hop, _, *rest = _LAYOUT.unpack_from(raw)
    shape, nbytes, sent_at = tuple(rest[:MAX_DIMS]), rest[MAX_DIMS], rest[MAX_DIMS + 1]
    if magic != _MAGIC or version != _VERSION:
        raise WireError(f"not a planaria frame of version {_VERSION} (starts with {magic!r}, version {version})")
    if content not in _CONTENTS or code not in _DTYPES or dims > MAX_DIMS:
        raise WireError(f"unknown content {content}, dtype code {code} or {dims} dimensions")
    header = Header(Content(content), generation, step, microbatch, hop, _DTYPES[code], shape[:dims], sent_at)
    if header.nbytes != nbytes or not math.isfinite(sent_at):
        raise WireError(f"frame sent at {sent_at} announces {nbytes} bytes, its shape {header.shape} {header.nbytes}")
    sides = math.prod(side for side in header.shape if side)  # they may be absurd although another one is 0
    if sides * header.dtype.itemsize > max_bytes:
        raise WireError(f"frame {header.shape} announces {nbytes} bytes; this edge carries at most {max_bytes}")
    return header
