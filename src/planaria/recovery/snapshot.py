"""Snapshot: the stages keep parities of one another, in step with training (after REFT, arXiv 2310.12670, version 1).

All stages of a replica, the ends among them, are one group. Each cuts its state into blocks, and each holds parities of
the others' (``codes/layout.py``), which it gets with the update of every step. So whatever ``tolerate`` stages are lost
together, neighbours or not, what is left determines them: the weights, moments and clocks of the last commit, bit for
bit. For single losses `redundant` costs fewer bytes a step, and more memory.

A block carries the length of the state that it is from. So stages of different sizes need not know each other's.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from planaria.errors import UserError
from planaria.model.packing import pack, packed_bytes, unpack
from planaria.model.state import Shapes, StageState
from planaria.recovery.base import (
    Answer,
    Copy,
    CopyCost,
    Holder,
    Moment,
    Needs,
    Original,
    Recovery,
    Replica,
    Sender,
    Workshop,
)
from planaria.recovery.codes import Layout, code
from planaria.recovery.codes.base import Code

LENGTH_BYTES = 8
PARITY, MEMBERS = "parity", "members"


class Snapshot(Recovery):
    """How many stages may be lost together, and by which code."""

    needs: ClassVar[Needs] = Needs(
        meanwhile="wait", why="steps that one stage misses leave every parity behind the stages that made them"
    )
    exact: ClassVar[bool] = True
    tolerate: int = Field(1, ge=1, le=127)
    """stages that may be lost together; a group has at least twice as many"""
    code: str = "auto"
    """auto (XOR for one, Reed-Solomon for more), xor, reed_solomon, local, or a code file (.json)"""

    @property
    def variety(self) -> str:
        return f"any {self.tolerate}"

    def copies(self, stages: int) -> tuple[Copy, ...]:
        group = self._group(stages)
        return tuple(
            Copy(group.givers(stripe), host) for stripe in range(group.members) for host in group.holders(stripe)
        )

    def sender(self, copy: Copy, stage: int) -> Sender:
        group = self._group_of(copy)
        return BlockSender(group.given(stage).index(_stripe(group, copy)), group.code.data)

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        group = self._group_of(copy)
        row = group.holders(_stripe(group, copy)).index(copy.host)
        return ParityHolder(copy.sources, Code(group.code.weights[row : row + 1]))

    def cost(self, copy: Copy, shapes: Mapping[int, Shapes]) -> CopyCost:
        parts = self._group_of(copy).code.data
        blocks = [LENGTH_BYTES + -(-packed_bytes(own) // parts) for own in shapes.values()]
        return CopyCost(sum(blocks) / len(blocks), max(blocks))

    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        group = self._group(replica.stages)
        # A stage that is new has not sent yet, and has heard nothing: its blocks belong to no version with the others'.
        gone = lost | {stage for stage in range(group.members) if not replica.ages[stage]}
        donors, refused = {}, {}
        for stage in sorted(lost):
            reads = group.reads(gone, stage, parity=False)
            if isinstance(reads, str):
                new = f", and {_list(gone - lost)} have not taken part in a step since" if gone - lost else ""
                refused[stage] = f"{len(lost)} of {group.members} stages are lost together ({_list(lost)}{new})"
            else:
                donors[stage] = tuple(sorted({who for members in reads.values() for who in members}))
        return Answer(donors, refused)

    def give(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        group = self._group_of(next(iter(kept)))
        (me,) = {copy.host for copy in kept}
        whole, wanted = _packed.of(own), set(group.given(lost))
        blocks = {str(t): _block(whole, n, group.code.data) for n, t in enumerate(group.given(me)) if t in wanted}
        held = {str(_stripe(group, copy)): parity.weights[PARITY] for copy, parity in kept.items()}
        return StageState(blocks | held | {MEMBERS: torch.tensor(group.members)})

    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        """:raises LossError: when what was given does not determine the stage."""
        (members,) = {int(part.weights[MEMBERS]) for part in given.values()}
        group = self._group(members - 1)
        blocks = []
        for stripe in group.given(stage):
            there = {who: part.weights[str(stripe)] for who, part in given.items() if str(stripe) in part.weights}
            longest = max(map(len, there.values()))
            wanted = group.shard(stripe, stage)
            reads = {group.shard(stripe, who): _padded(block, longest) for who, block in there.items()}
            blocks.append(group.code.repair(reads, [wanted])[wanted])
        return unpack(_joined([torch.from_numpy(block) for block in blocks]))

    def _group(self, stages: int) -> Layout:
        members = stages + 1
        if members < 2 * self.tolerate:
            raise UserError(
                f"recovery.options.tolerate = {self.tolerate}: the ends and {stages} block stages are {members}, and a "
                "group that can lose so many has at least twice as many; lower it"
            )
        return _group(self.code, members, self.tolerate)

    def _group_of(self, copy: Copy) -> Layout:
        return self._group(len(copy.sources) + self.tolerate - 1)


@lru_cache
def _group(name: str, members: int, tolerate: int) -> Layout:
    """Who gives and who holds in which stripe; sizes play no part, as blocks carry theirs."""
    return Layout((0,) * members, code(name, members, tolerate))


def _stripe(group: Layout, copy: Copy) -> int:
    """The stripe of which ``copy.host`` holds this parity."""
    return next(t for t in range(group.members) if group.givers(t) == copy.sources and copy.host in group.holders(t))


class _Packed:
    """The bytes of the state that was asked for last: a stage sends parts of it to many. Forgotten with the state."""

    def __init__(self) -> None:
        self._of: weakref.ref[StageState] | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, state: StageState) -> Tensor:
        if self._of is None or self._of() is not state:
            self._bytes = pack(state.trained)
            self._of = weakref.ref(state, self._forget)
        return self._bytes

    def _forget(self, gone: weakref.ref[StageState]) -> None:
        if self._of is gone:
            self._bytes = self._bytes[:0].clone()


_packed = _Packed()


def _block(whole: Tensor, number: int, parts: int) -> Tensor:
    """Block ``number`` of a state's bytes, after their length."""
    size = -(-len(whole) // parts)
    length = torch.frombuffer(bytearray(len(whole).to_bytes(LENGTH_BYTES, "little")), dtype=torch.uint8)
    return torch.cat([length, whole[number * size : (number + 1) * size]])


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    """A state's bytes from all its blocks, each with its length and perhaps with padding."""
    (length,) = {int.from_bytes(block[:LENGTH_BYTES].numpy().tobytes(), "little") for block in blocks}
    size = -(-length // len(blocks))
    return torch.cat([block[LENGTH_BYTES : LENGTH_BYTES + size] for block in blocks])[:length]


def _padded(block: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(block, (0, size - len(block)))


class BlockSender:
    """Sends one block of the stage's state after every update."""

    nbytes = 0

    def __init__(self, number: int, parts: int) -> None:
        self._number, self._parts = number, parts

    def restart(self) -> None:
        """Every step sends all: nothing is built upon."""

    def before(self, step: int, state: StageState) -> Tensor | None:
        return None

    def updates_first(self, step: int) -> bool:
        return True

    def after(self, step: int, state: StageState, gradients: StageState) -> Tensor | None:
        return _block(_packed.of(state), self._number, self._parts)

    def commit(self, step: int) -> None: ...

    def drop(self) -> None: ...


class ParityHolder:
    """Holds one parity of the sources' blocks as of the last commit, and gathers those of the step under way."""

    def __init__(self, sources: Sequence[int], row: Code) -> None:
        """``row``: a code of this one parity."""
        self._sources, self._row = tuple(sources), row
        self._held = torch.empty(0, dtype=torch.uint8)
        self._pending: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    def restart(self) -> None:
        """What is held stays until all have sent again."""

    def expects(self, step: int) -> tuple[Moment, ...]:
        return ("after",)

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        if message.dtype != torch.uint8 or message.ndim != 1 or len(message) <= LENGTH_BYTES:
            raise ValueError(f"a block is a row of bytes, not {message.dtype} {list(message.shape)}")
        self._pending[source] = message

    def passes(self, microbatch: int, x: Tensor) -> None:
        """Activations are nothing to a parity."""

    def commit(self, step: int) -> None:
        if self._pending.keys() == set(self._sources):
            (parity,) = self._row.encode([self._pending[source] for source in self._sources])
            self._held = torch.from_numpy(parity)
        self._pending.clear()

    def drop(self) -> None:
        self._pending.clear()

    def state(self) -> StageState:
        return StageState({PARITY: self._held})


def _list(stages: Collection[int]) -> str:
    return ", ".join(map(str, sorted(stages)))
