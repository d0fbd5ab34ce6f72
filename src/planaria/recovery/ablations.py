"""Ablations: a lost block stage becomes random weights, the identity, or a copy of a neighbour.

Random weights and the identity need no donor. A residual block whose output projections are zero passes its input on
unchanged: the stage is skipped, and learns again from there, since the gradients of those projections are not zero.
The copy is half of what CheckFree averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from planaria.models.state import StageState
from planaria.recovery.base import Answer, Copy, Needs, Recovery, Replica, Workshop

OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""what a decoder layer adds to the residual stream is linear in these"""


class Redraw(Recovery):
    """New random weights."""

    unfit: ClassVar[str] = "a lost stage is drawn anew"

    lr_scale: Annotated[float, Field(gt=0)] = 1.1
    """the new stage's learning rate is multiplied by this once"""

    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        refused = {0: "the ends worker (stage 0) holds the only embedding and head"} if 0 in lost else {}
        return Answer(dict.fromkeys(sorted(lost - {0}), ()), refused)

    def give(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        raise LookupError("nobody gives anything")

    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        return StageState(self._drawn(at), lr_scale=self.lr_scale)

    def _drawn(self, at: Workshop) -> dict[str, Tensor]:
        return dict(at.draw())


class Identity(Redraw):
    """The stage changes nothing until it has learnt to."""

    def _drawn(self, at: Workshop) -> dict[str, Tensor]:
        weights = super()._drawn(at)
        return weights | {name: torch.zeros_like(w) for name, w in weights.items() if name.endswith(OUTPUTS)}


class CopyNeighbour(Recovery):
    """The weights of the stage before, or of the one after if that one is lost too or is the ends."""

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
