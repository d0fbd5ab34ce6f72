"""Layout of a parity group: N members, N stripes, and rotating parity, so that all members hold equally much.

Each member's bytes are cut into k equal blocks, padded with zeros to the longest member's. In stripe t, members t …
t+r−1 (mod N) hold the r = N − k parities; each other member contributes its next block. So a member has data in k
stripes and parity in r. A member of Z bytes holds r/k · Z of parity, and sends and receives r · Z per snapshot. With
Reed–Solomon, rebuilding one lost member reads k · Z for its data and N · Z including its parity.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planaria.recovery.codes.base import MAX_BYTES, ErasureCode, LossError
from planaria.recovery.codes.field import Bytes


@dataclass(frozen=True)
class Layout:
    """A parity group: the bytes of each member's state, and the code over them."""

    sizes: tuple[int, ...]
    code: ErasureCode

    def __post_init__(self) -> None:
        if len(self.sizes) != self.code.shards:
            raise ValueError(f"{len(self.sizes)} members and a code of {self.code.shards} shards")
        if not all(0 <= size <= MAX_BYTES for size in self.sizes):
            raise ValueError(f"states of {self.sizes} bytes: each has 0 to {MAX_BYTES}")

    @property
    def members(self) -> int:
        return len(self.sizes)

    @property
    def block(self) -> int:
        """Bytes of a block: a k-th of the longest state, in multiples of eight."""
        return -(-max(self.sizes) // (8 * self.code.data)) * 8

    @property
    def overhead(self) -> float:
        """Parity held, relative to the longest state."""
        return (self.members - self.code.data) * self.block / max(1, *self.sizes)

    def shard(self, stripe: int, member: int) -> int:
        """Return the number of a member's shard in a stripe: data if below k."""
        return (member - stripe - (self.members - self.code.data)) % self.members

    def member(self, stripe: int, shard: int) -> int:
        """Return the member that has this shard of a stripe."""
        return (shard + stripe + (self.members - self.code.data)) % self.members

    def givers(self, stripe: int) -> tuple[int, ...]:
        """Return the members whose data is in a stripe, by shard."""
        return tuple(self.member(stripe, shard) for shard in range(self.code.data))

    def holders(self, stripe: int) -> tuple[int, ...]:
        """Return the members that hold a stripe's parities, by shard."""
        return tuple(self.member(stripe, shard) for shard in range(self.code.data, self.members))

    def given(self, member: int) -> tuple[int, ...]:
        """Return the stripes to which a member gives data, by block; in the others it holds parity."""
        return tuple(stripe for stripe in range(self.members) if self.shard(stripe, member) < self.code.data)

    def cut(self, member: int, state: Any) -> dict[int, Bytes]:
        """Return a member's blocks by stripe: views of its state, without padding.

        :raises ValueError: for a state of another size.
        """
        flat = isinstance(state, bytes | bytearray | memoryview)
        whole: Bytes = np.frombuffer(state, np.uint8) if flat else np.asarray(state)
        if whole.shape != (self.sizes[member],) or whole.dtype != np.uint8:
            raise ValueError(f"member {member}: {self.sizes[member]} bytes, not {whole.dtype} of shape {whole.shape}")
        starts = range(0, self.code.data * self.block, self.block or 1)
        return {t: whole[start : start + self.block] for t, start in zip(self.given(member), starts, strict=False)}

    def join(self, member: int, blocks: Mapping[int, Bytes]) -> Bytes:
        """Join a member's state from its blocks by stripe, without padding."""
        parts = [blocks[stripe][: self.block] for stripe in self.given(member)] if self.block else []
        whole = np.zeros(self.code.data * self.block, np.uint8)
        for n, part in enumerate(parts):
            whole[n * self.block : n * self.block + part.size] = part
        return whole[: self.sizes[member]]

    def padded(self, block: Bytes) -> Bytes:
        """Pad a block to its full length."""
        return block if block.size == self.block else np.pad(block, (0, self.block - block.size))

    def parities(self, states: Sequence[Any]) -> dict[tuple[int, int], Bytes]:
        """Return all parities of a snapshot, by (stripe, member that holds it)."""
        blocks = [self.cut(member, state) for member, state in enumerate(states)]
        result = {}
        for stripe in range(self.members):
            encoded = self.code.encode([self.padded(blocks[who].get(stripe, _NONE)) for who in self.givers(stripe)])
            result.update({(stripe, who): each for who, each in zip(self.holders(stripe), encoded, strict=True)})
        return result

    def reads(self, lost: Collection[int], heir: int, parity: bool = True) -> dict[int, tuple[int, ...]] | str:
        """Return the members to read per stripe to rebuild the lost member ``heir``, or why that is impossible.

        With ``parity`` the parities that it held are rebuilt too.
        """
        result = {}
        for stripe in range(self.members) if parity else self.given(heir):
            plan = self.code.plan([self.shard(stripe, who) for who in lost], [self.shard(stripe, heir)])
            if isinstance(plan, str):
                return f"members {', '.join(map(str, sorted(lost)))} of {self.members} cannot be rebuilt together"
            result[stripe] = tuple(self.member(stripe, shard) for shard in plan)
        return result

    def rebuild(self, stripe: int, heir: int, blocks: Mapping[int, Bytes]) -> Bytes:
        """Return the lost block of ``heir`` in a stripe from other members' blocks.

        :raises LossError: naming the members, if their blocks do not suffice.
        """
        wanted = self.shard(stripe, heir)
        reads = {self.shard(stripe, who): self.padded(block) for who, block in blocks.items()}
        try:
            return self.code.repair(reads, [wanted])[wanted]
        except LossError:
            there = ", ".join(map(str, sorted(blocks))) or "none"
            raise LossError(f"stripe {stripe}: members {there} do not suffice to rebuild member {heir}") from None


_NONE = np.zeros(0, np.uint8)
