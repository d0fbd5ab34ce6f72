"""Parities of several stages' states, held at another stage: senders of blocks, holders of parities and of snapshots.

The strategy that uses them is ``Snapshot`` (``recovery/snapshot.py``). If parities follow every step, senders send
blocks of the updated state, and holders keep the parity of the last commit. With a snapshot every few steps, each stage
copies its state when one begins, sends it in slices over the next steps, and retains it (``snapshot_schedule.py``).

A state travels as a *stream* of bytes, cut into blocks:

    [length of the packed state: 8 bytes, 56 empty] [packed state, without digests] [padding, where a block needs it]

So it can be joined from its blocks alone, although stages differ in size.
"""

from __future__ import annotations

import weakref
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from planaria.common.memory_pool import MemoryPool
from planaria.models.packing import bare_bytes, pack_bare, unpack
from planaria.models.state import StageShapes, StageState
from planaria.recovery.base import Moment, RestoredHolder, Sender
from planaria.recovery.codes.base import ErasureCode
from planaria.recovery.snapshot_schedule import SnapshotSchedule, SnapshotVersions

PARITY = "parity"
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


class _SnapshotSide:
    """Common state of both sides of a copy: the pending and the retained snapshot."""

    def __init__(self, schedule: SnapshotSchedule) -> None:
        self._schedule = schedule
        self._versions = SnapshotVersions()

    def restart(self) -> None:
        """Discard the pending snapshot; keep the retained one."""
        self._versions = self._versions.restart()

    @property
    def retained(self) -> int:
        """The step of the retained snapshot; -1: none."""
        return self._versions.retained

    def _slice(self, step: int) -> int:
        """Return the slice to send in ``step``; -1: none."""
        number = self._versions.begin(step, self._schedule).slice(step)
        return number if number < self._schedule.slices else -1

    def drop(self) -> None:
        """Drop the step: a snapshot that began with it begins again with the next attempt, from the same state."""


class BlockSender(_SnapshotSide, Sender):
    """Sends one block of the stage's state, after every update or slice by slice of each snapshot.

    It holds no memory; the stage's worker retains the snapshot.
    """

    def __init__(self, number: int, parts: int, schedule: SnapshotSchedule) -> None:
        super().__init__(schedule)
        self._number = number
        self._parts = parts
        self._snapshot: Tensor | None = None

    def restart(self) -> None:
        super().restart()
        self._snapshot = None

    def message_before_step(self, step: int, state: StageState) -> Tensor | None:
        if self._schedule.in_step:
            return None
        if (n := self._slice(step)) < 0:
            return None
        if self._snapshot is None:
            self._snapshot = stream(state)
        return block(self._snapshot, self._number * self._schedule.slices + n, self._parts * self._schedule.slices)

    def needs_applied_update(self, step: int) -> bool:
        return self._schedule.in_step

    def message_after_gradient(self, step: int, state: StageState, gradients: StageState) -> Tensor | None:
        return block(stream(state), self._number, self._parts) if self._schedule.in_step else None

    def commit(self, step: int) -> None:
        self._versions = self._versions.begin(step, self._schedule).commit(step, self._schedule)
        if self._versions.pending < 0:
            self._snapshot = None


class _SnapshotHolder(_SnapshotSide, RestoredHolder):
    """Holds the retained snapshot's bytes with checksums, and collects those of the pending one."""

    def __init__(self, schedule: SnapshotSchedule) -> None:
        super().__init__(schedule)
        self._retained_rows: list[CheckedRow] = []
        self._pending_rows: list[CheckedRow] = []

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in (*self._retained_rows, *self._pending_rows))

    def restart(self) -> None:
        super().restart()
        self._pending_rows.clear()

    def commit(self, step: int) -> None:
        versions = self._versions.begin(step, self._schedule)
        if (row := self._committed_row()) is not None:
            self._pending_rows.append(CheckedRow(row))
        self.drop()
        self._versions = versions.commit(step, self._schedule)
        if versions.completes(step, self._schedule):
            self._retained_rows, self._pending_rows = self._pending_rows, []

    def intact(self) -> bool:
        return all(row.intact() for row in self._retained_rows)

    @abstractmethod
    def _committed_row(self) -> Tensor | None:
        """Return the bytes to keep from the step that is committed, if any."""


class ParityHolder(_SnapshotHolder):
    """Holds one parity of the sources' blocks, by slice."""

    def __init__(self, sources: Sequence[int], row: ErasureCode, schedule: SnapshotSchedule) -> None:
        """``row``: a code with this one parity."""
        super().__init__(schedule)
        self._sources, self._row = tuple(sources), row
        self._current_slices: dict[int, Tensor] = {}
        """source → its slice of the current step"""

    def expects(self, step: int) -> tuple[Moment, ...]:
        if self._schedule.in_step:
            return ("after",)
        return ("before",) if self._slice(step) >= 0 else ()

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        if message.dtype != torch.uint8 or message.ndim != 1:
            raise ValueError(f"a block is a row of bytes, not {message.dtype} {list(message.shape)}")
        self._current_slices[source] = message

    def _committed_row(self) -> Tensor | None:
        if self._current_slices.keys() != set(self._sources):
            return None
        (parity,) = self._row.encode([self._current_slices[source] for source in self._sources])
        return torch.from_numpy(parity)

    def drop(self) -> None:
        self._current_slices.clear()

    def state(self) -> StageState:
        return StageState({f"{PARITY}{n}": row.whole for n, row in enumerate(self._retained_rows)})

    def load(self, state: StageState, step: int) -> None:
        self._retained_rows = [CheckedRow(state.weights[f"{PARITY}{n}"]) for n in range(len(state.weights))]
        self._versions = SnapshotVersions(step)


class SelfCopySender(_SnapshotSide, Sender):
    """Passes the stage's state to its :class:`SelfCopyHolder` when a snapshot begins."""

    def message_before_step(self, step: int, state: StageState) -> Tensor | None:
        return stream(state) if self._slice(step) == 0 else None

    def commit(self, step: int) -> None:
        self._versions = self._versions.begin(step, self._schedule).commit(step, self._schedule)


class SelfCopyHolder(_SnapshotHolder):
    """Holds the stage's own state of the retained and of the pending snapshot."""

    def __init__(self, schedule: SnapshotSchedule) -> None:
        super().__init__(schedule)
        self._current_state: Tensor | None = None

    def expects(self, step: int) -> tuple[Moment, ...]:
        return ("before",) if self._slice(step) == 0 else ()

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        self._current_state = message

    def _committed_row(self) -> Tensor | None:
        return self._current_state

    def drop(self) -> None:
        self._current_state = None

    def state(self) -> StageState:
        assert self._retained_rows, "no snapshot is retained yet"
        return state_in(self._retained_rows[0].whole)

    def load(self, state: StageState, step: int) -> None:
        self._retained_rows, self._versions = [CheckedRow(stream(state))], SnapshotVersions(step)


class CheckedRow:
    """A row of bytes with a CRC-32 that a thread computes in the background."""

    def __init__(self, whole: Tensor) -> None:
        """``whole``: uint8 [n], not written to afterwards."""
        self.whole = whole
        self._stored_checksum = _checksum_pool().submit(_checksum, whole)

    def __deepcopy__(self, memo: object) -> CheckedRow:
        return CheckedRow(self.whole.clone())

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def intact(self) -> bool:
        """Whether the bytes are unchanged."""
        return self._stored_checksum.result() == _checksum(self.whole)


@cache
def _checksum_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "checksums")


def _checksum(whole: Tensor) -> int:
    return zlib.crc32(whole.numpy().data)
