"""Snapshot: the stages keep parities of one another's states (after REFT, arXiv 2310.12670, version 1).

All stages of a replica, stage 0 included, form one group. Each cuts its state into blocks and holds parities of the
others' (:class:`ParityGroup`). Any ``tolerate`` stages that are lost together can be rebuilt bit for bit: weights,
moments, clocks and generators, and the parities that they held.

In step (``every`` = 0), parities follow every update, and no stage rolls back. Retained (``every`` > 0), each stage
also keeps its own state of the last snapshot, and all roll back to it. For single losses `redundant` sends fewer bytes
per step and uses more memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from planaria.common.errors import UserError
from planaria.models.state import StageShapes, StageState
from planaria.recovery.base import (
    Copy,
    CopyCost,
    DamagedReplica,
    RebuildInputs,
    StrategyPlan,
)
from planaria.recovery.codes import make_code
from planaria.recovery.codes.base import ErasureCode
from planaria.recovery.common_snapshot import NO_SNAPSHOT, CommonSnapshot
from planaria.recovery.parity import PARITY, block, block_bytes, join_blocks, state_in, stream, stream_bytes

MEMBERS = "members"


@dataclass(frozen=True)
class ParityGroup:
    """N members with rotating parities, so that all hold equally much.

    Each member's state is cut into k equal blocks, padded with zeros to the longest member's. In stripe t, members t …
    t+r−1 (mod N) hold the r = N − k parities; each other member contributes its next block. So a member has data in k
    stripes and parity in r. A member of Z bytes holds r/k · Z of parity, and sends and receives r · Z per snapshot.
    With Reed–Solomon, rebuilding one lost member reads k · Z for its data and N · Z including its parity.
    """

    code: ErasureCode

    @property
    def members(self) -> int:
        """N."""
        return self.code.shards

    def shard(self, stripe: int, member: int) -> int:
        """Return the number of a member's shard in a stripe: data if below k."""
        return (member - stripe - (self.members - self.code.data)) % self.members

    def _member(self, stripe: int, shard: int) -> int:
        return (shard + stripe + (self.members - self.code.data)) % self.members

    def data_members(self, stripe: int) -> tuple[int, ...]:
        """Return the members whose data is in a stripe, by shard."""
        return tuple(self._member(stripe, shard) for shard in range(self.code.data))

    def parity_members(self, stripe: int) -> tuple[int, ...]:
        """Return the members that hold a stripe's parities, by shard."""
        return tuple(self._member(stripe, shard) for shard in range(self.code.data, self.members))

    def data_stripes(self, member: int) -> tuple[int, ...]:
        """Return the stripes with a member's data, by block; in the others it holds parity."""
        return tuple(stripe for stripe in range(self.members) if self.shard(stripe, member) < self.code.data)

    def members_to_read(self, lost: Collection[int], rebuilt: int) -> dict[int, tuple[int, ...]] | None:
        """Return the members to read per stripe for the lost member ``rebuilt``, with the parities that it held.

        Return None if the others do not determine it.
        """
        by_stripe = {}
        for stripe in range(self.members):
            plan = self.code.plan([self.shard(stripe, member) for member in lost], [self.shard(stripe, rebuilt)])
            if isinstance(plan, str):
                return None
            by_stripe[stripe] = tuple(self._member(stripe, shard) for shard in plan)
        return by_stripe


class Snapshot(CommonSnapshot):
    """Keep erasure-coded parities of all stages."""

    caption: ClassVar[str] = "the others send their parities, from which {stage} is recomputed exactly"
    tolerate: int = Field(1, ge=1, le=127)
    """stages that may be lost together; a group has at least twice as many"""
    code: str = "auto"
    """auto (XOR for one, Reed-Solomon for more), xor, reed_solomon, local, or a code file (.json), whose contents
    become part of the run's recipe"""

    @property
    def quality_key(self) -> str:
        return f"any {self.tolerate}" + (f", every {self.every}" if self.every else "")

    def copies_sent_per_snapshot(self, members: int) -> int:
        group = self._group(members)
        return group.members - group.code.data

    def copies(self, stages: int) -> tuple[Copy, ...]:
        group = self._group(stages + 1)
        members = range(group.members)
        retained = [Copy((stage,), stage) for stage in members if self.every]
        hosts = {stripe: group.parity_members(stripe) for stripe in members}
        parities = (Copy(group.data_members(t), host, group.members) for t in members for host in hosts[t])
        return (*retained, *parities)

    def block_of(self, copy: Copy, stage: int) -> tuple[int, int]:
        group = self._group(copy.group)
        return group.data_stripes(stage).index(_stripe(group, copy)), group.code.data

    def code_of(self, copy: Copy) -> ErasureCode:
        group = self._group(copy.group)
        row = group.parity_members(_stripe(group, copy)).index(copy.host)
        return ErasureCode(group.code.weights[row : row + 1])

    def cost(self, copy: Copy, shapes: Mapping[int, StageShapes]) -> CopyCost:
        # The retained and the pending snapshot; the memory of older ones is reused.
        versions = 2 if self.every else 1
        if copy.is_self_copy:
            return CopyCost(0, versions * stream_bytes(shapes[copy.host]))
        slices = self.slices
        blocks = [block_bytes(own, self._group(copy.group).code.data * slices) for own in shapes.values()]
        sent = slices * sum(blocks) / len(blocks) / max(1, self.snapshot_schedule.every)
        return CopyCost(sent, versions * slices * max(blocks), in_background=not self.snapshot_schedule.in_step)

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        group = self._group(replica.stages + 1)
        if lost and not replica.with_snapshot:
            return StrategyPlan(refused=dict.fromkeys(lost, NO_SNAPSHOT))
        missing = self.without_snapshot(lost, replica)
        donors, refused = {}, {}
        for stage in sorted(missing if self.every else lost):
            reads = group.members_to_read(missing, stage)
            if reads is None:
                new = f", and {_list(missing - lost)} have not taken part in a step since" if missing - lost else ""
                refused[stage] = f"{len(lost)} of {group.members} stages are lost together ({_list(lost)}{new})"
            else:
                donors[stage] = tuple(sorted({member for members in reads.values() for member in members}))
        if refused:  # stages roll back together or not at all
            reason = next(iter(refused.values()))
            return StrategyPlan({}, dict.fromkeys(lost, reason)) if self.every else StrategyPlan(donors, refused)
        return StrategyPlan(donors, {}, "memory" if self.every else None)

    def helps_rebuild(self, copy: Copy, lost: int) -> bool:
        """Return whether ``copy`` is a parity: it has the lost stage's blocks, or rebuilds a parity that it held."""
        return not copy.is_self_copy

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        group = self._group(next(iter(kept)).group)
        (me,) = {copy.host for copy in kept}
        whole, slices = stream(own), self.slices
        blocks = {
            f"{stripe}.{n}": block(whole, number * slices + n, group.code.data * slices)
            for number, stripe in enumerate(group.data_stripes(me))
            for n in range(slices)
        }
        parities = {
            f"{_stripe(group, copy)}.{key.removeprefix(PARITY)}": row
            for copy, parity in kept.items()
            for key, row in parity.weights.items()
        }
        return StageState(blocks | parities | {MEMBERS: torch.tensor(group.members)})

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        """Return the stage's state from the blocks and parities sent.

        :raises LossError: if they do not determine the stage.
        """
        group = self._group_of(donated)
        stripes, slices = group.data_stripes(stage), range(self.slices)
        blocks = [self._repair(group, stripe, n, stage, donated) for stripe in stripes for n in slices]
        return state_in(join_blocks(blocks))

    def rebuild_copy(self, copy: Copy, donated: Mapping[int, StageState]) -> StageState | None:
        if copy.is_self_copy:
            return None  # the rebuilt state is the retained state
        group = self._group_of(donated)
        stripe, slices = _stripe(group, copy), range(self.slices)
        return StageState({f"{PARITY}{n}": self._repair(group, stripe, n, copy.host, donated) for n in slices})

    def _repair(
        self, group: ParityGroup, stripe: int, number: int, stage: int, donated: Mapping[int, StageState]
    ) -> Tensor:
        """Return the lost block or parity of ``stage`` in a stripe."""
        key, shard = f"{stripe}.{number}", group.shard(stripe, stage)
        blocks = {member: state.weights[key] for member, state in donated.items() if key in state.weights}
        longest = max(map(len, blocks.values()))
        reads = {group.shard(stripe, member): _pad(row, longest) for member, row in blocks.items()}
        return torch.from_numpy(group.code.repair(reads, [shard])[shard])

    def _group(self, members: int) -> ParityGroup:
        """Return the parity group of ``members``."""
        if members < 2 * self.tolerate:
            raise UserError(
                f"recovery.options.tolerate = {self.tolerate}: the ends and {members - 1} block stages are {members} "
                "members, and a group has at least twice as many members as it may lose; lower it"
            )
        return ParityGroup(_code(self.code, members, self.tolerate))

    def _group_of(self, donated: Mapping[int, StageState]) -> ParityGroup:
        (members,) = {int(state.weights[MEMBERS]) for state in donated.values()}
        return self._group(members)


_code = lru_cache(make_code)


def _stripe(group: ParityGroup, copy: Copy) -> int:
    """Return the stripe of the parity that ``copy.host`` holds."""
    stripes = (stripe for stripe in range(group.members) if group.data_members(stripe) == copy.sources)
    return next(stripe for stripe in stripes if copy.host in group.parity_members(stripe))


def _pad(row: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, size - len(row)))


def _list(stages: Collection[int]) -> str:
    return ", ".join(map(str, sorted(stages)))
