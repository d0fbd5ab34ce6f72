"""Frames: the header before every tensor on an edge, and the memory of payloads.

A header has 128 bytes, little endian, without pickle. It is validated against the receiver's expectations before any
payload is read.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from planaria.common.memory_pool import MemoryPool

HEADER_BYTES = 128
MAX_DIMS = 4
_NUMBERS = 4
"""numbers in a label"""
_LAYOUT = struct.Struct("<4sBBBB 4I 4Q Q d BBB 53x")
_MAGIC = b"PLNR"
_VERSION = 5
_LATEST_S = 1e9
"""largest valid time of a monotonic clock, s: an uptime of thirty years"""
_DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16, 3: torch.int64, 4: torch.uint8}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LARGE = 256 << 10
"""least bytes of a frame whose memory is kept for the next of that size"""
_NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64, torch.uint8: np.uint8}
_KEPT = 64 << 20
"""bytes of kept memory"""
_ZEROS = [(0,) * count for count in range(max(MAX_DIMS, _NUMBERS) + 1)]


class WireError(Exception):
    """A frame is malformed, or larger than the edge allows."""


class FrameContent(enum.IntEnum):
    """Content of a frame."""

    FORWARD = 0
    BACKWARD = 1
    SHARE = 2
    COPY_BEFORE = 3
    COPY_AFTER = 4
    STATE = 5
    PREFETCHED = 6
    BLOCKING = 7
    PING = 8
    PONG = 9
    CLOSING = 10
    PIECE = 11
    ACK = 12


Pass = Literal[FrameContent.FORWARD, FrameContent.BACKWARD]
CopyMoment = Literal[FrameContent.COPY_BEFORE, FrameContent.COPY_AFTER]
Part = Literal[FrameContent.PREFETCHED, FrameContent.BLOCKING]


class Activation(NamedTuple):
    """The output of a microbatch's visit: an activation forward, a gradient backward."""

    generation: int
    step: int
    microbatch: int
    hop: int
    """hop of the sender"""
    content: Pass


class GradientShare(NamedTuple):
    """The sender's share of its stage's gradient, or the sum over all nodes."""

    generation: int
    step: int
    part: int = 0
    """number of a share, if a node sends several in a step"""
    content: Literal[FrameContent.SHARE] = FrameContent.SHARE


class CopyMessage(NamedTuple):
    """An update of a copy of a stage, sent before the step's passes, or after its gradient is complete."""

    generation: int
    step: int
    slot: int
    """the copy's index in the recovery chain's slots"""
    content: CopyMoment


class State(NamedTuple):
    """A packed state for a worker that takes over a stage. Its edge belongs to one generation and carries only this."""

    stage: int
    """stage of the sender"""
    content: Literal[FrameContent.STATE] = FrameContent.STATE


class UpdatePart(NamedTuple):
    """A part of a replica's update in an exchange round."""

    round: int
    content: Part


class Ping(NamedTuple):
    """A timed message, or the answer to it."""

    number: int
    content: Literal[FrameContent.PING, FrameContent.PONG]


class EdgeClosing(NamedTuple):
    """The last frame of an edge."""

    content: Literal[FrameContent.CLOSING] = FrameContent.CLOSING


class Piece(NamedTuple):
    """The next bytes of the last announced frame, of low priority."""

    content: Literal[FrameContent.PIECE] = FrameContent.PIECE


class Ack(NamedTuple):
    """Acknowledgement of a piece."""

    content: Literal[FrameContent.ACK] = FrameContent.ACK


Label = Activation | GradientShare | CopyMessage | State | UpdatePart | Ping | EdgeClosing | Piece | Ack
"""identity of a frame: numbers below 2³², then its content, so that labels of different kinds differ"""

_KINDS: tuple[Any, ...] = (
    Activation, Activation, GradientShare, CopyMessage, CopyMessage, State, UpdatePart, UpdatePart, Ping, Ping,
    EdgeClosing, Piece, Ack
)  # fmt: skip
_LABELS = {content: (content, kind, len(kind._fields) - 1) for content, kind in zip(FrameContent, _KINDS, strict=True)}
"""code of a content → the content, its label, and the label's count of numbers"""


class TensorHeader(NamedTuple):
    """The header of a tensor. ``sent_at``: the sender's monotonic clock (s), for emulated links and transit times."""

    label: Label
    dtype: torch.dtype
    shape: tuple[int, ...]
    sent_at: float = 0.0
    announced: bool = False
    """whether the tensor arrives in pieces, between other frames"""
    slot: int = 0
    """slot of the sender's ring that holds the tensor, counted from 1; 0: the tensor follows"""
    ticket: int = 0
    """ticket under which the slot is shared"""

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def in_ring(label: Label) -> bool:
    """Return whether the tensor may be in a ring; states and gradient shares may be read for longer than the edge
    exists.
    """
    return isinstance(label, Activation | Ping)


def pack(header: TensorHeader) -> bytes:
    """Return the header as :data:`HEADER_BYTES` bytes; WireError if it does not fit."""
    *numbers, content = header.label
    dims = len(header.shape)
    if dims > MAX_DIMS:
        raise WireError(f"a tensor of {dims} dimensions does not fit a frame (at most {MAX_DIMS})")
    if header.dtype not in _CODES:
        raise WireError(f"dtype {header.dtype} does not travel on edges")
    try:
        return _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            content,
            _CODES[header.dtype],
            dims,
            *numbers,
            *_ZEROS[_NUMBERS - len(numbers)],
            *header.shape,
            *_ZEROS[MAX_DIMS - dims],
            header.nbytes,
            header.sent_at,
            header.announced,
            header.slot,
            header.ticket,
        )
    except struct.error as error:
        raise WireError(f"{header.label} does not fit a frame: {error}") from None


def unpack(raw: bytes | bytearray, max_bytes: int) -> TensorHeader:
    """Return the header in ``raw``; WireError if it is malformed or announces more than ``max_bytes``."""
    magic, version, code, kind, dims, *rest = _LAYOUT.unpack_from(raw)
    if magic != _MAGIC or version != _VERSION:
        raise WireError(f"not a planaria frame of version {_VERSION} (starts with {magic!r}, version {version})")
    if code not in _LABELS or kind not in _DTYPES or dims > MAX_DIMS:
        raise WireError(f"unknown content {code}, dtype code {kind} or {dims} dimensions")
    content, label, count = _LABELS[code]
    if any(rest[count:_NUMBERS]):
        raise WireError(f"a frame of {content.name} has {count} numbers, not {rest[:_NUMBERS]}")
    *sides, nbytes, sent_at, announced, slot, ticket = rest[_NUMBERS:]
    identity = label(*rest[:count], content)
    header = TensorHeader(identity, _DTYPES[kind], tuple(sides[:dims]), sent_at, bool(announced), slot, ticket)
    if header.nbytes != nbytes or not 0.0 <= sent_at < _LATEST_S:
        raise WireError(f"frame sent at {sent_at} announces {nbytes} bytes, its shape {header.shape} {header.nbytes}")
    if slot and (header.announced or not in_ring(header.label)):
        raise WireError(f"a frame of {content.name} cannot be in slot {header.slot} of a ring")
    nonzero = math.prod(side for side in header.shape if side)  # dimensions may be absurd although another is 0
    if nonzero * header.dtype.itemsize > max_bytes:
        raise WireError(f"frame {header.shape} announces {nbytes} bytes; this edge carries at most {max_bytes}")
    return header


_take: Callable[[int], Tensor] = MemoryPool(_KEPT).take


def use_allocator(take: Callable[[int], Tensor], sizes: Collection[int]) -> None:
    """Receive frames of these ``sizes`` into memory from ``take``, uint8 [size].

    Frames of other sizes, such as states, are rare, and page-locked memory is slow to allocate.
    """
    global _take
    pool = MemoryPool(_KEPT).take

    def chosen(wanted: int) -> Tensor:
        return take(wanted) if wanted in sizes else pool(wanted)

    _take = chosen


def receive_buffer(header: TensorHeader) -> Tensor:
    """Return an uninitialised tensor for the payload of ``header``."""
    return buffer(header.dtype, header.shape, header.nbytes)


def buffer(dtype: torch.dtype, shape: Sequence[int], size: int) -> Tensor:
    """Return an uninitialised tensor of ``size`` bytes, to be filled immediately."""
    if size >= _LARGE:
        return _take(size).view(dtype).view(tuple(shape))
    if size and dtype in _NUMPY:  # much faster than torch.empty; an empty array's stride is 0, which no view accepts
        return torch.from_numpy(np.empty(shape, _NUMPY[dtype]))
    return torch.empty(tuple(shape), dtype=dtype)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any type, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach()
    if tensor.dtype not in _NUMPY:
        flat = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single number may have any stride
    array: Any = flat.numpy()
    return memoryview(array).cast("B")
