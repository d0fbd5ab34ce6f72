"""A stage's state as a row of bytes, cut into blocks, for parities and snapshots.

    [length of the packed state: 8 bytes, 56 empty] [packed state, without digests] [padding, where a block needs it]

So a state can be joined from its blocks alone, although stages differ in size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from planaria.common.memory_pool import MemoryPool
from planaria.models.packing import bare_bytes, pack_bare, unpack
from planaria.models.state import StageShapes, StageState

HEAD = 64
"""bytes before the packed state, which stays aligned"""
_UNIT = 64
"""block sizes are multiples of this many bytes"""


class _Streams:
    """The stream of the last requested state, shared by all senders of the stage.

    It is freed with its state and its last user.
    """

    def __init__(self) -> None:
        self._pool = MemoryPool(1 << 40)
        self._of: weakref.ref[StageState] | None = None
        self._stream: Tensor | None = None

    def __call__(self, state: StageState) -> Tensor:
        """Return a copy of ``state`` as uint8; the same memory for the same object."""
        if self._stream is None or self._of is None or self._of() is not state:
            self._stream = self._pack(state)
            self._of = weakref.ref(state, self._forget)
        return self._stream

    def _pack(self, state: StageState) -> Tensor:
        whole: list[Tensor] = []

        def memory(size: int) -> Tensor:
            whole.append(self._pool.take(HEAD + size))
            return whole[0][HEAD:]

        packed = pack_bare(state, memory)
        length = len(packed).to_bytes(8, "little")
        whole[0][:HEAD] = torch.frombuffer(bytearray(length.ljust(HEAD, b"\0")), dtype=torch.uint8)
        return whole[0]

    def _forget(self, reference: weakref.ref[StageState]) -> None:
        if self._of is reference:
            self._stream = self._of = None


stream = _Streams()


def state_in(whole: Tensor) -> StageState:
    """Return the state in a stream; shares memory.

    :raises PackingError: if there is none.
    """
    return unpack(whole[HEAD:], digests=False)


def block(whole: Tensor, number: int, count: int) -> Tensor:
    """Return block ``number`` of a stream cut into ``count``; shares memory. The last ones may be short or empty."""
    size = _size(len(whole), count)
    return whole[number * size : (number + 1) * size]


def join_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """Join a stream from all its blocks, in order; each may have padding."""
    length = HEAD + int.from_bytes(blocks[0][:8].numpy().tobytes(), "little")
    size = _size(length, len(blocks))
    return torch.cat([padded[:size] for padded in blocks])[:length]


def stream_bytes(shapes: StageShapes) -> int:
    """Return the length of the stream of a trained stage with these parameters, in fp32 on a CPU."""
    return HEAD + bare_bytes(shapes)


def block_bytes(shapes: StageShapes, count: int) -> int:
    """Return the length of each of ``count`` blocks of it, except the last ones."""
    return _size(stream_bytes(shapes), count)


def _size(length: int, count: int) -> int:
    return -(-length // (count * _UNIT)) * _UNIT
