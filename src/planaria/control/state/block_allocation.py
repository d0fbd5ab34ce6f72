"""Assignment of samples to replicas: each is used exactly once, even if replicas fail or join. Pure.

Samples are assigned in blocks of one replica's step. Block b belongs to lane b mod L, and each of the run's L initial
replicas has a lane. Without failures, replica r takes blocks r, r + L, r + 2L, …, whatever the timing. The remaining
replicas take over the lane of a lost one, lowest block first. A replica that finishes its lane helps the slowest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from planaria.control.state.base import State

V = TypeVar("V")
BlockRange = tuple[int, int]
"""first block and number of blocks; consecutive blocks of a lane are ``lanes`` apart"""


@dataclass(frozen=True)
class BlockSet:
    """A set of blocks: all below ``floor``, and those in ``ahead``, where bit n is block ``floor`` + n."""

    floor: int = 0
    ahead: int = 0

    @classmethod
    def of(cls, floor: int, beyond: Collection[int]) -> BlockSet:
        """Return the set of all blocks below ``floor`` and those in ``beyond``."""
        ahead = sum(1 << block - floor for block in set(beyond) if block >= floor)
        return cls(floor, ahead)._canonical()

    @property
    def beyond(self) -> frozenset[int]:
        """Blocks above the floor."""
        return frozenset(self.floor + n for n in range(self.ahead.bit_length()) if self.ahead >> n & 1)

    def __contains__(self, block: int) -> bool:
        return block < self.floor or bool(self.ahead >> block - self.floor & 1)

    def __len__(self) -> int:
        return self.floor + self.ahead.bit_count()

    def adding(self, block: int) -> BlockSet:
        """Return the set with ``block``."""
        return self if block in self else BlockSet(self.floor, self.ahead | 1 << block - self.floor)._canonical()

    def without(self, blocks: Collection[int]) -> BlockSet:
        """Return the set without ``blocks``."""
        floor = min([self.floor, *blocks])
        below = self.floor - floor
        ahead = self.ahead << below | (1 << below) - 1
        for block in blocks:
            ahead &= ~(1 << block - floor)
        return BlockSet(floor, ahead)._canonical()

    def _canonical(self) -> BlockSet:
        """Return the same set with the highest possible floor."""
        row = (~self.ahead & self.ahead + 1).bit_length() - 1  # length of the run of ones from bit 0
        return BlockSet(self.floor + row, self.ahead >> row) if row else self


@dataclass(frozen=True)
class BlockAllocation(State):
    """The blocks of samples that are committed or in progress, and each replica's commits since its last save."""

    lanes: int
    total: int
    """count of blocks, including earlier parts of the run"""
    used: BlockSet = BlockSet()
    in_progress: Mapping[int, int] = field(default_factory=dict)
    """replica → its block in progress"""
    reserved: Mapping[int, int] = field(default_factory=dict)
    """replica → the block of its next step, if that was announced with the commit before"""
    since_rollback_point: Mapping[int, tuple[BlockRange, ...]] = field(default_factory=dict)
    """replica → its commits since the state to which a rollback would return"""
    since_unsealed_save: Mapping[int, tuple[BlockRange, ...]] = field(default_factory=dict)
    """replica → the latest part of ``since_rollback_point``: after its save for a checkpoint that is not sealed yet"""

    since_memory_snapshot: Mapping[int, tuple[BlockRange, ...]] = field(default_factory=dict)
    """replica → its commits since the step in its workers' memory"""
    max_taken_block: int = 0
    """upper bound of all blocks ever taken"""

    def next_for(self, replica: int, lost: Collection[int], max_lag: int) -> int | None:
        """Return the next block of ``replica`` while the replicas in ``lost`` are absent, or None if none is left for
        it.

        It helps another lane only if that has more than ``max_lag`` free blocks.
        """
        if (own_block := self.in_progress.get(replica, self.reserved.get(replica))) is not None:
            return own_block
        open_lanes = [lane for lane in {replica, *lost} if lane < self.lanes]
        own = [block for lane in open_lanes if (block := next(self._free(lane), None)) is not None]
        if own:
            return min(own)
        if (self.total - self.used.floor) // self.lanes < max_lag:  # no lane has that many
            return None
        slow = [block for lane in range(self.lanes) for block in self._first_stealable(lane, max_lag)]
        return min(slow, default=None)

    def _free(self, lane: int) -> Iterator[int]:
        taken = {*self.in_progress.values(), *self.reserved.values()}
        first = self.used.floor + (lane - self.used.floor) % self.lanes
        return (b for b in range(first, self.total, self.lanes) if b not in self.used and b not in taken)

    def _first_stealable(self, lane: int, max_lag: int) -> list[int]:
        """Return the first free block of a lane with more than ``max_lag`` of them."""
        free = [block for block, _ in zip(self._free(lane), range(max_lag + 1), strict=False)]
        return free[:1] if len(free) > max_lag else []

    @property
    def has_block_for_every_replica(self) -> bool:
        """Whether every lane has a free block beyond all taken ones, so that there is one for every replica."""
        return max(self.used.floor + self.used.ahead.bit_length(), self.max_taken_block) + self.lanes <= self.total

    @property
    def done(self) -> bool:
        """Whether every block is used. Blocks ahead may exceed the total in a run resumed for fewer steps."""
        return self.used.floor >= self.total

    def take(self, replica: int, block: int) -> BlockAllocation:
        """Start a step of ``replica`` with ``block``."""
        return self.updated(
            in_progress={**self.in_progress, replica: block},
            reserved=_without(self.reserved, replica) if self.reserved else self.reserved,
            max_taken_block=max(self.max_taken_block, block + 1),
        )

    def reserve(self, replica: int, block: int) -> BlockAllocation:
        """Keep ``block`` for the next step of ``replica``."""
        return self.updated(
            reserved={**self.reserved, replica: block}, max_taken_block=max(self.max_taken_block, block + 1)
        )

    def commit(self, replica: int, remembered: int | None = None) -> BlockAllocation:
        """Commit the block in progress of ``replica``.

        :param remembered: steps that its workers can undo from memory, or None without one.
        """
        block, after = self.in_progress[replica], self.since_unsealed_save
        since = self.since_rollback_point
        since = {**since, replica: _with_block(since.get(replica, ()), block, self.lanes)}
        if replica in after:
            after = {**after, replica: _with_block(after[replica], block, self.lanes)}
        recent = self.since_memory_snapshot
        if remembered is not None:
            kept = _last(_with_block(recent.get(replica, ()), block, self.lanes), remembered, self.lanes)
            recent = {**recent, replica: kept}
        used, out = self.used.adding(block), _without(self.in_progress, replica)
        return self.updated(
            used=used,
            in_progress=out,
            since_rollback_point=since,
            since_unsealed_save=after,
            since_memory_snapshot=recent,
        )

    def started_past_checkpoint(self, steps: int) -> BlockAllocation:
        """Start a single replica ``steps`` after the checkpoint to which a rollback would return."""
        return replace(self, since_rollback_point={0: ((self.used.floor - steps, steps),)})

    def remove_replica(self, replica: int) -> BlockAllocation:
        """Remove ``replica`` and its saves; its blocks in progress and reserved become free, its commits remain."""
        return replace(
            self,
            in_progress=_without(self.in_progress, replica),
            reserved=_without(self.reserved, replica),
            since_unsealed_save=_without(self.since_unsealed_save, replica),
        )

    def save(self, replica: int) -> BlockAllocation:
        """Save ``replica`` as it is now for the next sealed checkpoint."""
        return replace(self, since_unsealed_save={**self.since_unsealed_save, replica: ()})

    @property
    def saved(self) -> BlockSet:
        """Return the blocks that the replicas had used when they were saved."""
        return self.used.without(
            [b for replica in self.since_unsealed_save for b in self._blocks(self.since_unsealed_save[replica])]
        )

    def seal(self) -> BlockAllocation:
        """Let rollbacks return to the replicas' last saves."""
        return replace(
            self,
            since_rollback_point={**self.since_rollback_point, **self.since_unsealed_save},
            since_unsealed_save={},
        )

    def give_up_save(self) -> BlockAllocation:
        """Cancel the checkpoint for which replicas were being saved."""
        return replace(self, since_unsealed_save={})

    def roll_back(self, replica: int) -> BlockAllocation:
        """Undo the commits of ``replica`` since its rollback point; their blocks become free."""
        return self._undo(replica, self.since_rollback_point.get(replica, ()), ())

    def undo_since_snapshot(self, replica: int) -> BlockAllocation:
        """Undo the commits of ``replica`` since the step in its workers' memory; their blocks become free.

        Its save for the last sealed checkpoint is not newer than that.
        """
        undone, since = self.since_memory_snapshot.get(replica, ()), self.since_rollback_point.get(replica, ())
        return self._undo(replica, undone, _first(since, _count(since) - _count(undone)))

    def _undo(self, replica: int, undone: tuple[BlockRange, ...], kept: tuple[BlockRange, ...]) -> BlockAllocation:
        """``kept``: commits since the rollback point that remain."""
        return replace(
            self,
            used=self.used.without(self._blocks(undone)),
            in_progress=_without(self.in_progress, replica),
            reserved=_without(self.reserved, replica),
            since_rollback_point={**self.since_rollback_point, replica: kept},
            since_unsealed_save=_without(self.since_unsealed_save, replica),
            since_memory_snapshot=_without(self.since_memory_snapshot, replica),
        )

    def _blocks(self, ranges: tuple[BlockRange, ...]) -> list[int]:
        return [first + self.lanes * k for first, length in ranges for k in range(length)]


def _with_block(ranges: tuple[BlockRange, ...], block: int, lanes: int) -> tuple[BlockRange, ...]:
    if ranges and block == ranges[-1][0] + lanes * ranges[-1][1]:
        return (*ranges[:-1], (ranges[-1][0], ranges[-1][1] + 1))
    return (*ranges, (block, 1))


def _count(ranges: tuple[BlockRange, ...]) -> int:
    return sum(length for _, length in ranges)


def _first(ranges: tuple[BlockRange, ...], count: int) -> tuple[BlockRange, ...]:
    kept: list[BlockRange] = []
    for first, length in ranges:
        if count > 0:
            kept.append((first, min(length, count)))
        count -= length
    return tuple(kept)


def _last(ranges: tuple[BlockRange, ...], count: int, lanes: int) -> tuple[BlockRange, ...]:
    over = _count(ranges) - count
    kept: list[BlockRange] = []
    for first, length in ranges:
        cut = min(max(over, 0), length)
        if cut < length:
            kept.append((first + cut * lanes, length - cut))
        over -= length
    return tuple(kept)


def _without(mapping: Mapping[int, V], key: int) -> Mapping[int, V]:
    return {other: value for other, value in mapping.items() if other != key}
