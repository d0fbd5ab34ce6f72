"""Assignment of samples to replicas: each is used exactly once, even if replicas fail or join. Pure.

Samples are assigned in blocks of one replica's step. Block b belongs to lane b mod L, and each of the run's L initial
replicas has a lane. Without failures, replica r takes blocks r, r + L, r + 2L, …, whatever the timing. The remaining
replicas take over the lane of a lost one, lowest block first. A replica that finishes its lane helps the slowest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from planaria.control.fast_replace import fast_replace

V = TypeVar("V")
Stretch = tuple[int, int]
"""first block, and count of blocks, each one lane's width after the previous"""


@dataclass(frozen=True)
class BlockSet:
    """A set of blocks: all below ``floor``, and those in ``ahead``, where bit n is block ``floor`` + n."""

    floor: int = 0
    ahead: int = 0

    @classmethod
    def of(cls, floor: int, beyond: Collection[int]) -> BlockSet:
        """Return the set of all blocks below ``floor`` and those in ``beyond``."""
        ahead = sum(1 << block - floor for block in set(beyond) if block >= floor)
        return cls(floor, ahead)._raised()

    @property
    def beyond(self) -> frozenset[int]:
        """Blocks above the floor."""
        return frozenset(self.floor + n for n in range(self.ahead.bit_length()) if self.ahead >> n & 1)

    def __contains__(self, block: int) -> bool:
        return block < self.floor or bool(self.ahead >> block - self.floor & 1)

    def __len__(self) -> int:
        return self.floor + self.ahead.bit_count()

    def with_(self, block: int) -> BlockSet:
        """Return the set with ``block``."""
        return self if block in self else BlockSet(self.floor, self.ahead | 1 << block - self.floor)._raised()

    def without(self, blocks: Collection[int]) -> BlockSet:
        """Return the set without ``blocks``."""
        floor = min([self.floor, *blocks])
        below = self.floor - floor
        ahead = self.ahead << below | (1 << below) - 1
        for block in blocks:
            ahead &= ~(1 << block - floor)
        return BlockSet(floor, ahead)._raised()

    def _raised(self) -> BlockSet:
        """Return the same set with the highest possible floor."""
        row = (~self.ahead & self.ahead + 1).bit_length() - 1  # length of the run of ones from bit 0
        return BlockSet(self.floor + row, self.ahead >> row) if row else self


@dataclass(frozen=True)
class Allotment:
    """Committed blocks, blocks in progress, and each replica's commits since its last save."""

    lanes: int
    total: int
    """count of blocks, including earlier parts of the run"""
    used: BlockSet = BlockSet()
    out: MappingProxyType[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """replica → its block in progress"""
    since: MappingProxyType[int, tuple[Stretch, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """replica → its commits since the state to which a rollback would return"""
    after: MappingProxyType[int, tuple[Stretch, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """replica → the latest part of ``since``: after its save for a checkpoint that is not sealed yet"""

    recent: MappingProxyType[int, tuple[Stretch, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """replica → its commits since the step in its workers' memory"""
    top: int = 0
    """upper bound of all blocks ever taken"""

    def next_for(self, replica: int, lost: Collection[int], patience: int) -> int | None:
        """Return the next block of ``replica`` while the replicas in ``lost`` are absent; None if none is left for it.

        It helps another lane only if that has more than ``patience`` free blocks.
        """
        if replica in self.out:
            return self.out[replica]
        deserted = {replica, *lost} & set(range(self.lanes)) if lost else {replica} if replica < self.lanes else ()
        own = [block for lane in deserted if (block := next(self._free(lane), None)) is not None]
        if own:
            return min(own)
        if (self.total - self.used.floor) // self.lanes < patience:  # no lane has that many
            return None
        slow = [block for lane in range(self.lanes) for block in self._beyond_help(lane, patience)]
        return min(slow, default=None)

    def _free(self, lane: int) -> Iterator[int]:
        """Yield a lane's free blocks, lowest first."""
        taken = self.out.values()
        first = self.used.floor + (lane - self.used.floor) % self.lanes
        return (b for b in range(first, self.total, self.lanes) if b not in self.used and b not in taken)

    def _beyond_help(self, lane: int, patience: int) -> list[int]:
        """Return the first free block of a lane with more than ``patience`` of them."""
        results = [block for block, _ in zip(self._free(lane), range(patience + 1), strict=False)]
        return results[:1] if len(results) > patience else []

    @property
    def plenty(self) -> bool:
        """Whether every lane has a free block beyond all taken ones, so that there is one for every replica."""
        return max(self.used.floor + self.used.ahead.bit_length(), self.top) + self.lanes <= self.total

    @property
    def done(self) -> bool:
        """Whether every block is used. Blocks ahead may exceed the total in a run resumed for fewer steps."""
        return self.used.floor >= self.total

    def take(self, replica: int, block: int) -> Allotment:
        """Start a step of ``replica`` with ``block``."""
        return fast_replace(self, out=MappingProxyType(self.out | {replica: block}), top=max(self.top, block + 1))

    def commit(self, replica: int, remembered: int | None = None) -> Allotment:
        """Commit the block in progress of ``replica``.

        :param remembered: steps that its workers can undo from memory; None: no memory.
        """
        block, after = self.out[replica], self.after
        since = MappingProxyType(self.since | {replica: _longer(self.since.get(replica, ()), block, self.lanes)})
        if replica in after:
            after = MappingProxyType(after | {replica: _longer(after[replica], block, self.lanes)})
        recent = self.recent
        if remembered is not None:
            kept = _last(_longer(recent.get(replica, ()), block, self.lanes), remembered, self.lanes)
            recent = MappingProxyType(recent | {replica: kept})
        used, out = self.used.with_(block), _without(self.out, replica)
        return fast_replace(self, used=used, out=out, since=since, after=after, recent=recent)

    def begun_after(self, steps: int) -> Allotment:
        """Start a single replica ``steps`` after the checkpoint to which a rollback would return."""
        return replace(self, since=MappingProxyType({0: ((self.used.floor - steps, steps),)}))

    def leave(self, replica: int) -> Allotment:
        """Remove ``replica`` and its saves; its block in progress becomes free, its commits remain."""
        return replace(self, out=_without(self.out, replica), after=_without(self.after, replica))

    def save(self, replica: int) -> Allotment:
        """Save ``replica`` as it is now for the next sealed checkpoint."""
        return replace(self, after=MappingProxyType(self.after | {replica: ()}))

    @property
    def saved(self) -> BlockSet:
        """Return the blocks that the replicas had used when they were saved."""
        return self.used.without([b for replica in self.after for b in self._blocks(self.after[replica])])

    def seal(self) -> Allotment:
        """Let rollbacks return to the replicas' last saves."""
        return replace(self, since=MappingProxyType(self.since | self.after), after=MappingProxyType({}))

    def give_up_save(self) -> Allotment:
        """Cancel the checkpoint for which replicas were being saved."""
        return replace(self, after=MappingProxyType({}))

    def roll_back(self, replica: int) -> Allotment:
        """Undo the commits of ``replica`` since its rollback point; their blocks become free."""
        undone = self._blocks(self.since.get(replica, ()))
        return replace(
            self,
            used=self.used.without(undone),
            out=_without(self.out, replica),
            since=_without(self.since, replica),
            after=_without(self.after, replica),
            recent=_without(self.recent, replica),
        )

    def recall(self, replica: int) -> Allotment:
        """Undo the commits of ``replica`` since the step in its workers' memory; their blocks become free.

        Its save for the last sealed checkpoint is not newer than that.
        """
        undone = self._blocks(self.recent.get(replica, ()))
        since = self.since.get(replica, ())
        left = sum(length for _, length in since) - len(undone)
        return replace(
            self,
            used=self.used.without(undone),
            out=_without(self.out, replica),
            since=MappingProxyType(self.since | {replica: _first(since, left)}),
            after=_without(self.after, replica),
            recent=_without(self.recent, replica),
        )

    def _blocks(self, stretches: tuple[Stretch, ...]) -> list[int]:
        return [first + self.lanes * k for first, length in stretches for k in range(length)]


def _longer(stretches: tuple[Stretch, ...], block: int, lanes: int) -> tuple[Stretch, ...]:
    """Return ``stretches`` with one more block."""
    if stretches and block == stretches[-1][0] + lanes * stretches[-1][1]:
        return (*stretches[:-1], (stretches[-1][0], stretches[-1][1] + 1))
    return (*stretches, (block, 1))


def _first(stretches: tuple[Stretch, ...], count: int) -> tuple[Stretch, ...]:
    """Return the first ``count`` blocks."""
    kept: list[Stretch] = []
    for first, length in stretches:
        if count > 0:
            kept.append((first, min(length, count)))
        count -= length
    return tuple(kept)


def _last(stretches: tuple[Stretch, ...], count: int, lanes: int) -> tuple[Stretch, ...]:
    """Return the last ``count`` blocks."""
    over = sum(length for _, length in stretches) - count
    kept: list[Stretch] = []
    for first, length in stretches:
        cut = min(max(over, 0), length)
        if cut < length:
            kept.append((first + cut * lanes, length - cut))
        over -= length
    return tuple(kept)


def _without(mapping: MappingProxyType[int, V], key: int) -> MappingProxyType[int, V]:
    left = mapping.copy()
    left.pop(key, None)
    return MappingProxyType(left)
