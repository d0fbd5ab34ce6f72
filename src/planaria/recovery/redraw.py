"""Ablations that need no donor: a lost block stage is drawn anew, as random weights or as the identity.

A residual block whose output projections are zero passes its input on unchanged: the stage is skipped, and learns
again from there, since the gradients of those projections are not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from planaria.models.state import StageState
from planaria.recovery.base import Answer, Copy, Recovery, Replica, Workshop

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
