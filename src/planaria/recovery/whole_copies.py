"""Whole copies: every few steps each stage's state goes to the next stage's memory (the idea of Gemini, SOSP 2023).

All stages also retain their own state of the same step and roll back to it after a loss; the next stage sends the lost
one's. Compared with `snapshot` for one loss: the same bytes sent, more memory, and one read per rebuilt stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from planaria.common.errors import UserError
from planaria.models.state import StageShapes, StageState
from planaria.recovery.base import Copy, CopyCost, DamagedReplica, RebuildInputs, StrategyPlan
from planaria.recovery.codes.base import ErasureCode
from planaria.recovery.common_snapshot import NO_SNAPSHOT, CommonSnapshot
from planaria.recovery.parity import PARITY, block, block_bytes, join_blocks, state_in, stream, stream_bytes

COPY = "copy"
OWN = "own"
_IDENTITY = ErasureCode(np.ones((1, 1), np.uint8))
"""the code of one source: its bytes"""


class WholeCopies(CommonSnapshot):
    """Copy each stage's state to the next stage."""

    caption: ClassVar[str] = "{donors} sends the copy of {stage} that it has kept"
    every: Annotated[int, Field(ge=1)] | Literal["best"] = 10
    """steps between snapshots, to which all stages roll back after a loss; best: the interval that loses least at the
    recipe's [network], in slices that leave most of each link to training"""

    def copies(self, stages: int) -> tuple[Copy, ...]:
        if stages < 2:
            raise UserError(
                "pipeline.stages = 1: whole_copies needs at least 2 block stages; set pipeline.stages = 2 or more"
            )
        members = range(stages + 1)
        return (*(Copy((s,), s) for s in members), *(Copy((s,), (s + 1) % len(members)) for s in members))

    def block_of(self, copy: Copy, stage: int) -> tuple[int, int]:
        return 0, 1

    def code_of(self, copy: Copy) -> ErasureCode:
        return _IDENTITY

    def cost(self, copy: Copy, shapes: Mapping[int, StageShapes]) -> CopyCost:
        ((_, parameters),) = shapes.items()
        if copy.is_self_copy:
            return CopyCost(0, 2 * stream_bytes(parameters))
        sent = min(self.slices * block_bytes(parameters, self.slices), stream_bytes(parameters))
        return CopyCost(sent / self.snapshot_schedule.every, 2 * sent, in_background=True)

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        if lost and not replica.with_snapshot:
            return StrategyPlan(refused=dict.fromkeys(lost, NO_SNAPSHOT))
        count = replica.stages + 1
        missing = self.without_snapshot(lost, replica)
        for stage in sorted(missing):
            if (host := (stage + 1) % count) in missing:
                why = f"stage {stage}'s copy was at stage {host}, which is lost too or has no copy yet"
                return StrategyPlan(refused=dict.fromkeys(lost, why))
        # The next stage has the copy; the previous one sends its own state, of which the lost stage had the copy.
        return StrategyPlan(
            {s: ((s + 1) % count, (s - 1) % count) for s in sorted(missing)}, {}, "memory" if missing else None
        )

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        if kept:
            (copy,) = kept.values()
            return StageState({f"{COPY}{key.removeprefix(PARITY)}": row for key, row in copy.weights.items()})
        whole, numbers = stream(own), range(self.slices)
        return StageState({f"{OWN}{n}": block(whole, n, len(numbers)) for n in numbers})

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        (copy,) = (state.weights for state in donated.values() if f"{COPY}0" in state.weights)
        return state_in(join_blocks([copy[f"{COPY}{n}"] for n in range(self.slices)]))

    def rebuild_copy(self, copy: Copy, donated: Mapping[int, StageState]) -> StageState | None:
        if copy.is_self_copy:
            return None  # the rebuilt state is the retained state
        source_state = donated[copy.sources[0]].weights
        return StageState({f"{PARITY}{n}": source_state[f"{OWN}{n}"] for n in range(self.slices)})
