"""The ablation ``copy``: a lost block stage becomes a copy of a neighbour: half of what CheckFree averages.

The stage before it gives, or the one after it where that one is lost too or is the ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planaria.config import RecoveryConfig
from planaria.model.state import StageState
from planaria.recovery.base import Answer, Copy, Replica, Workshop
from planaria.recovery.keepless import Keepless


@dataclass(frozen=True)
class CopyNeighbour(Keepless):
    """Weights of one neighbour, its moments too if ``moments``."""

    lr_scale: float = 1.1
    moments: bool = False

    @classmethod
    def from_config(cls, config: RecoveryConfig) -> CopyNeighbour:
        return cls(config.lr_scale, config.moments != "fresh")

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
        return own.part(lambda name: True, self.moments)

    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        (near,) = given.values()
        return StageState(near.weights, near.moments, near.clocks, self.lr_scale)
