"""Ablations that need no donor: a lost block stage is drawn anew, as random weights or as the identity.

A residual block whose output projections are zero passes its input on unchanged: the stage is skipped, and learns
again from there, since the gradients of those projections are not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from planaria.config import RecoveryConfig
from planaria.model.state import StageState
from planaria.recovery.base import Answer, Copy, Replica, Workshop
from planaria.recovery.keepless import Keepless

OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""what a decoder layer adds to the residual stream is linear in these"""


@dataclass(frozen=True)
class Redraw(Keepless):
    """New random weights; with ``identity`` the stage changes nothing until it has learnt to."""

    identity: bool
    lr_scale: float = 1.1

    @classmethod
    def random(cls, config: RecoveryConfig) -> Redraw:
        return cls(identity=False, lr_scale=config.lr_scale)

    @classmethod
    def skipped(cls, config: RecoveryConfig) -> Redraw:
        return cls(identity=True, lr_scale=config.lr_scale)

    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        refused = {0: "the ends worker (stage 0) holds the only embedding and head"} if 0 in lost else {}
        return Answer(dict.fromkeys(sorted(lost - {0}), ()), refused)

    def give(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        raise LookupError("nobody gives anything")

    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        weights = dict(at.draw())
        if self.identity:
            weights |= {name: torch.zeros_like(w) for name, w in weights.items() if name.endswith(OUTPUTS)}
        return StageState(weights, lr_scale=self.lr_scale)
