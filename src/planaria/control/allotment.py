"""Which samples a replica takes next, so that none is used twice and none is left out, whoever comes and goes. Pure.

Samples are handed out in blocks of one replica's step. Block b belongs to lane b mod L, of which every one of the L
replicas that a run begins with has its own: as long as all is well, replica r takes blocks r, r + L, r + 2L, … and no
timing has a say. A lane whose replica has gone is worked off by those that are left, lowest block first. Whoever is
through with its own lane helps the slowest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from planaria.control.copied import copied

V = TypeVar("V")
Stretch = tuple[int, int]
"""first block, and how many: each is one lane's width after the one before"""


@dataclass(frozen=True)
class Used:
    """A set of blocks: all below ``floor``, and those ``ahead``, where bit n stands for block ``floor`` + n."""

    floor: int = 0
    ahead: int = 0

    @classmethod
    def of(cls, floor: int, beyond: Collection[int]) -> Used:
        """All blocks below ``floor``, and those ``beyond``."""
        ahead = sum(1 << block - floor for block in set(beyond) if block >= floor)
        return cls(floor, ahead)._raised()

    @property
    def beyond(self) -> frozenset[int]:
        """The blocks above the floor."""
        return frozenset(self.floor + n for n in range(self.ahead.bit_length()) if self.ahead >> n & 1)

    def __contains__(self, block: int) -> bool:
        return block < self.floor or bool(self.ahead >> block - self.floor & 1)

    def __len__(self) -> int:
        return self.floor + self.ahead.bit_count()

    def with_(self, block: int) -> Used:
        """The same and ``block``."""
        return self if block in self else Used(self.floor, self.ahead | 1 << block - self.floor)._raised()

    def without(self, blocks: Collection[int]) -> Used:
        """The same less ``blocks``."""
        floor = min([self.floor, *blocks])
        below = self.floor - floor
        ahead = self.ahead << below | (1 << below) - 1
        for block in blocks:
            ahead &= ~(1 << block - floor)
        return Used(floor, ahead)._raised()

    def _raised(self) -> Used:
        """The same set, with the highest floor that it can have."""
        row = (~self.ahead & self.ahead + 1).bit_length() - 1  # ones in a row, from bit 0 on
        return Used(self.floor + row, self.ahead >> row) if row else self


@dataclass(frozen=True)
class Allotment:
    """Blocks that were committed, those under way, and what each replica has committed since it was last saved."""

    lanes: int
    total: int
    """blocks there are, those of earlier parts of the run included"""
    used: Used = Used()
    out: MappingProxyType[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """replica → the block that it has under way"""
    since: MappingProxyType[int, tuple[Stretch, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """replica → what it has committed since the state to which a rollback would take it"""
    after: MappingProxyType[int, tuple[Stretch, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """replica → the latest part of that: since it was saved for a checkpoint that is not sealed yet"""

    recent: MappingProxyType[int, tuple[Stretch, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """replica → what it has committed since the step that its workers remember"""
    top: int = 0
    """all blocks that were ever taken are below"""

    def next_for(self, replica: int, gone: Collection[int], patience: int) -> int | None:
        """The block that ``replica`` takes, while the replicas ``gone`` are not there; None if nothing is left for it.

        It helps with the lane of another only where that has more than ``patience`` free blocks.
        """
        if replica in self.out:
            return self.out[replica]
        deserted = {replica, *gone} & set(range(self.lanes)) if gone else {replica} if replica < self.lanes else ()
        mine = [block for lane in deserted if (block := next(self._free(lane), None)) is not None]
        if mine:
            return min(mine)
        if (self.total - self.used.floor) // self.lanes < patience:  # no lane has so many
            return None
        slow = [block for lane in range(self.lanes) for block in self._beyond_help(lane, patience)]
        return min(slow, default=None)

    def _free(self, lane: int) -> Iterator[int]:
        """Blocks of a lane that nobody has taken, the lowest first."""
        taken = self.out.values()
        first = self.used.floor + (lane - self.used.floor) % self.lanes
        return (b for b in range(first, self.total, self.lanes) if b not in self.used and b not in taken)

    def _beyond_help(self, lane: int, patience: int) -> list[int]:
        """The first free block of a lane that has more than ``patience`` of them."""
        found = [block for block, _ in zip(self._free(lane), range(patience + 1), strict=False)]
        return found[:1] if len(found) > patience else []

    @property
    def plenty(self) -> bool:
        """Has every lane a free block yet, beyond all that were ever taken? Then there is one for every replica."""
        return max(self.used.floor + self.used.ahead.bit_length(), self.top) + self.lanes <= self.total

    @property
    def done(self) -> bool:
        """Is every block used? Those ahead may lie beyond the last one, in a run that is resumed for fewer steps."""
        return self.used.floor >= self.total

    def take(self, replica: int, block: int) -> Allotment:
        """``replica`` begins a step with ``block``."""
        return copied(self, out=MappingProxyType(self.out | {replica: block}), top=max(self.top, block + 1))

    def commit(self, replica: int, remembered: int | None = None) -> Allotment:
        """``replica`` has committed the block that it had under way.

        Its workers can go back so many steps of theirs (``remembered``); None: they remember nothing.
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
        return copied(self, used=used, out=out, since=since, after=after, recent=recent)

    def begun_after(self, steps: int) -> Allotment:
        """A single replica begins so many steps after the checkpoint to which a rollback would take it."""
        return replace(self, since=MappingProxyType({0: ((self.used.floor - steps, steps),)}))

    def leave(self, replica: int) -> Allotment:
        """``replica`` goes, and is in no checkpoint; what it had under way is free, what it committed stays."""
        return replace(self, out=_without(self.out, replica), after=_without(self.after, replica))

    def save(self, replica: int) -> Allotment:
        """``replica`` is saved as it is now, for a checkpoint that is to be sealed."""
        return replace(self, after=MappingProxyType(self.after | {replica: ()}))

    @property
    def saved(self) -> Used:
        """What the replicas had used when they were saved."""
        return self.used.without([b for replica in self.after for b in self._blocks(self.after[replica])])

    def seal(self) -> Allotment:
        """From now on a rollback leads to where the replicas were last saved."""
        return replace(self, since=MappingProxyType(self.since | self.after), after=MappingProxyType({}))

    def give_up_save(self) -> Allotment:
        """The checkpoint for which replicas were being saved will not be sealed."""
        return replace(self, after=MappingProxyType({}))

    def roll_back(self, replica: int) -> Allotment:
        """``replica`` goes back to where a rollback takes it; what it committed since then is free again."""
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
        """``replica`` goes back to what its workers remember; what it committed since then is free again.

        What it was saved as for the last checkpoint that is sealed is not newer.
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
    """``stretches`` and one block more."""
    if stretches and block == stretches[-1][0] + lanes * stretches[-1][1]:
        return (*stretches[:-1], (stretches[-1][0], stretches[-1][1] + 1))
    return (*stretches, (block, 1))


def _first(stretches: tuple[Stretch, ...], count: int) -> tuple[Stretch, ...]:
    """The first ``count`` blocks of them."""
    kept: list[Stretch] = []
    for first, length in stretches:
        if count > 0:
            kept.append((first, min(length, count)))
        count -= length
    return tuple(kept)


def _last(stretches: tuple[Stretch, ...], count: int, lanes: int) -> tuple[Stretch, ...]:
    """The last ``count`` blocks of them."""
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
