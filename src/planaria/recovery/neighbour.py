"""The ablation ``copy``: a lost block stage becomes a copy of a neighbour: half of what CheckFree averages.

The stage before it gives, or the one after it where that one is lost too or is the ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from planaria.models.state import StageState
from planaria.recovery.base import Answer, Copy, Needs, Recovery, Replica, Workshop


class CopyNeighbour(Recovery):
    """The weights of one neighbour."""

    needs: ClassVar[Needs] = Needs(alike=True)
    unfit: ClassVar[str] = "a lost stage becomes its neighbour's copy"

    lr_scale: Annotated[float, Field(gt=0)] = 1.1
    """the rebuilt stage's learning rate is multiplied by this once"""
    moments: Literal["fresh", "copy"] = "fresh"
    """its optimizer moments: zero, or the neighbour's"""

    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        donors, refused = {}, {}
        for stage in sorted(lost):
            near = [s for s in (stage - 1, stage + 1) if 1 <= s <= replica.stages and s not in lost]
            if stage == 0:
                refused[stage] = "the ends worker (stage 0) holds the only embedding and head"
            elif near:
                donors[stage] = (near[0],)
            else:
                refused[stage] = f"stage {stage} has no neighbour left to copy"
        return Answer(donors, refused)

    def give(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        return own.part(lambda name: True, self.moments == "copy")

    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        (near,) = given.values()
        return StageState(near.weights, near.moments, near.clocks, self.lr_scale)
