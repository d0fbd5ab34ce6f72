"""Parities of several stages' states, held at another stage: senders of blocks, holders of parities and of snapshots.

If parities follow every step, senders send blocks of the updated state, and holders keep the parity of the last
commit. With a snapshot every few steps, each stage copies its state when one begins, sends it in slices over the next
steps, and retains it (``retention.py``).
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from planaria.models.state import StageState
from planaria.recovery.base import Moment, RestoredHolder, Sender
from planaria.recovery.codes.base import ErasureCode
from planaria.recovery.retention import SnapshotRetention, SnapshotVersions
from planaria.recovery.stream import block, state_in, stream

PARITY = "parity"


class _Side:
    """Common state of both sides of a copy: the pending and the retained snapshot."""

    def __init__(self, rule: SnapshotRetention) -> None:
        self._rule = rule
        self._versions = SnapshotVersions()

    def restart(self) -> None:
        """Discard the pending snapshot; keep the retained one."""
        self._versions = self._versions.restart()

    @property
    def retained(self) -> int:
        """The step of the retained snapshot; -1: none yet."""
        return self._versions.retained

    def _slice(self, step: int) -> int:
        """Return the slice to send in ``step``; -1: none."""
        number = self._versions.begin(step, self._rule).slice(step)
        return number if number < self._rule.slices else -1

    def drop(self) -> None:
        """Drop the step: a snapshot that began with it begins again with the next attempt, from the same state."""


class BlockSender(_Side, Sender):
    """Sends one block of the stage's state, after every update or slice by slice of each snapshot.

    It holds no memory; the stage's worker retains the snapshot.
    """

    def __init__(self, number: int, parts: int, rule: SnapshotRetention) -> None:
        super().__init__(rule)
        self._number, self._parts = number, parts
        self._snapshot: Tensor | None = None

    def restart(self) -> None:
        super().restart()
        self._snapshot = None

    def before(self, step: int, state: StageState) -> Tensor | None:
        if self._rule.in_step:
            return None
        if (n := self._slice(step)) < 0:
            return None
        if self._snapshot is None:
            self._snapshot = stream(state)
        return block(self._snapshot, self._number * self._rule.slices + n, self._parts * self._rule.slices)

    def updates_first(self, step: int) -> bool:
        return self._rule.in_step

    def after(self, step: int, state: StageState, gradients: StageState) -> Tensor | None:
        return block(stream(state), self._number, self._parts) if self._rule.in_step else None

    def commit(self, step: int) -> None:
        self._versions = self._versions.begin(step, self._rule).commit(step, self._rule)
        if self._versions.pending < 0:
            self._snapshot = None


class _Keeper(_Side, RestoredHolder):
    """Holds checked bytes of the retained snapshot, and collects those of the pending one."""

    def __init__(self, rule: SnapshotRetention) -> None:
        super().__init__(rule)
        self._held: list[CheckedRow] = []
        self._coming: list[CheckedRow] = []

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in (*self._held, *self._coming))

    def restart(self) -> None:
        super().restart()
        self._coming.clear()

    def commit(self, step: int) -> None:
        versions = self._versions.begin(step, self._rule)
        if (row := self._received()) is not None:
            self._coming.append(CheckedRow(row))
        self.drop()
        self._versions = versions.commit(step, self._rule)
        if versions.completed(step, self._rule):
            self._held, self._coming = self._coming, []

    def intact(self) -> bool:
        return all(row.intact() for row in self._held)

    @abstractmethod
    def _received(self) -> Tensor | None:
        """Return the bytes to keep of the step that is committed, if any."""


class ParityHolder(_Keeper):
    """Holds one parity of the sources' blocks, by slice."""

    def __init__(self, sources: Sequence[int], row: ErasureCode, rule: SnapshotRetention) -> None:
        """``row``: a code with this one parity."""
        super().__init__(rule)
        self._sources, self._row = tuple(sources), row
        self._now: dict[int, Tensor] = {}
        """source → its slice of the current step"""

    def expects(self, step: int) -> tuple[Moment, ...]:
        if self._rule.in_step:
            return ("after",)
        return ("before",) if self._slice(step) >= 0 else ()

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        if message.dtype != torch.uint8 or message.ndim != 1:
            raise ValueError(f"a block is a row of bytes, not {message.dtype} {list(message.shape)}")
        self._now[source] = message

    def _received(self) -> Tensor | None:
        if self._now.keys() != set(self._sources):
            return None
        (parity,) = self._row.encode([self._now[source] for source in self._sources])
        return torch.from_numpy(parity)

    def drop(self) -> None:
        self._now.clear()

    def state(self) -> StageState:
        return StageState({f"{PARITY}{n}": row.whole for n, row in enumerate(self._held)})

    def load(self, state: StageState, step: int) -> None:
        self._held = [CheckedRow(state.weights[f"{PARITY}{n}"]) for n in range(len(state.weights))]
        self._versions = SnapshotVersions(step)


class OwnSender(_Side, Sender):
    """Passes the stage's state to its :class:`OwnHolder` when a snapshot begins."""

    def before(self, step: int, state: StageState) -> Tensor | None:
        return stream(state) if self._slice(step) == 0 else None

    def commit(self, step: int) -> None:
        self._versions = self._versions.begin(step, self._rule).commit(step, self._rule)


class OwnHolder(_Keeper):
    """Holds the stage's own state of the retained and of the pending snapshot."""

    def __init__(self, rule: SnapshotRetention) -> None:
        super().__init__(rule)
        self._now: Tensor | None = None

    def expects(self, step: int) -> tuple[Moment, ...]:
        return ("before",) if self._slice(step) == 0 else ()

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        self._now = message

    def _received(self) -> Tensor | None:
        return self._now

    def drop(self) -> None:
        self._now = None

    def state(self) -> StageState:
        assert self._held, "no snapshot is retained yet"
        return state_in(self._held[0].whole)

    def load(self, state: StageState, step: int) -> None:
        self._held, self._versions = [CheckedRow(stream(state))], SnapshotVersions(step)


class CheckedRow:
    """A row of bytes with a CRC-32 that a thread computes in the background."""

    def __init__(self, whole: Tensor) -> None:
        """``whole``: uint8 [n], not written to afterwards."""
        self.whole = whole
        self._sum = _beside().submit(_checksum, whole)

    def __deepcopy__(self, memo: object) -> CheckedRow:
        return CheckedRow(self.whole.clone())

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def intact(self) -> bool:
        """Whether the bytes are unchanged."""
        return self._sum.result() == _checksum(self.whole)


@cache
def _beside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "checksums")


def _checksum(whole: Tensor) -> int:
    return zlib.crc32(whole.numpy().data)
