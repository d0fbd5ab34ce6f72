"""CheckFree (arXiv 2506.15461, Algorithm 1): a lost middle stage is the gradient-weighted mean of its neighbours.

Nothing is kept anywhere before the failure. The neighbour whose last gradient was larger has converged less and weighs
more. First, last, adjacent and ends stages have no two neighbours to rebuild from and are out of its reach. The
formula is ``merging.merge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from planaria.config import RecoveryConfig
from planaria.model.state import StageState
from planaria.recovery.base import Answer, Copy, Replica, Workshop
from planaria.recovery.keepless import Keepless
from planaria.recovery.merging import merge, merge_moments


@dataclass(frozen=True)
class CheckFree(Keepless):
    """CheckFree's choices: how ω is measured, what a rebuilt stage's learning rate is multiplied by, and its moments.

    ``moments`` 'fresh' is the published code's reading; 'mean' and 'copy' [ours] give the rebuilt stage the weighted
    mean of its neighbours' moments, or those of the stage before it.
    """

    omega: Literal["l2sq", "l2", "uniform"] = "l2sq"
    measured: Literal["preclip", "postclip"] = "preclip"
    lr_scale: float = 1.1
    moments: Literal["fresh", "mean", "copy"] = "fresh"

    @classmethod
    def from_config(cls, config: RecoveryConfig) -> CheckFree:
        return cls(config.omega, config.measured, config.lr_scale, config.moments)

    @classmethod
    def uniform(cls, config: RecoveryConfig) -> CheckFree:
        """The ablation that weighs both neighbours alike."""
        return cls("uniform", config.measured, config.lr_scale, config.moments)

    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        """Both neighbours of every lost middle stage."""
        donors, refused = {}, {}
        for stage in sorted(lost):
            if why := self._refuses(stage, lost, replica.stages):
                refused[stage] = why
            else:
                donors[stage] = (stage - 1, stage + 1)
        return Answer(donors, refused)

    def give(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        return own.part(lambda name: True, moments=self.moments != "fresh")

    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        """The merged state of ``stage``; the plain mean as long as a neighbour has no gradient to go by."""
        before, after = given[stage - 1], given[stage + 1]
        omegas = self._omega(before), self._omega(after)
        omega_before, omega_after = omegas if None not in omegas and sum(filter(None, omegas)) > 0 else (1.0, 1.0)
        assert omega_before is not None and omega_after is not None
        weights = merge(before.weights, after.weights, omega_before, omega_after)
        if self.moments == "copy":
            return StageState(weights, before.moments, before.clocks, self.lr_scale)
        moments, clocks = merge_moments(before, after, (omega_before, omega_after), at.betas)
        return StageState(weights, moments, clocks, self.lr_scale)

    def _refuses(self, stage: int, lost: frozenset[int], stages: int) -> str:
        """Why ``stage`` cannot be rebuilt; empty if it can."""
        if stage == 0:
            return "the ends worker (stage 0) holds the only embedding and head"
        if stage in (1, stages):
            which = "first" if stage == 1 else "last"
            return f"stage {stage} is the {which} block stage: one neighbour only"
        if adjacent := sorted(lost & {stage - 1, stage + 1}):
            return f"stages {stage} and {adjacent[0]} are adjacent: each was the other's donor"
        return ""

    def _omega(self, donor: StageState) -> float | None:
        if self.omega == "uniform":
            return 1.0
        norm = donor.grad_norm if self.measured == "preclip" else donor.clipped_norm
        return norm if norm is None or self.omega == "l2" else norm * norm
