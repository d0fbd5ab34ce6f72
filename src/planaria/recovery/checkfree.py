"""CheckFree (arXiv 2506.15461, Algorithm 1): a lost middle stage is the gradient-weighted mean of its neighbours.

Nothing is kept anywhere before the failure. The neighbour whose last gradient was larger has converged less and weighs
more. First, last, adjacent and ends stages have no two neighbours to rebuild from and are out of its reach. The
formula is ``merging.merge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from planaria.models.state import StageState
from planaria.recovery.base import Answer, Copy, Needs, Recovery, Replica, Workshop
from planaria.recovery.merging import merge, merge_moments


class Uniform(Recovery):
    """The ablation that weighs both neighbours alike; what CheckFree adds to it is ω."""

    needs: ClassVar[Needs] = Needs(alike=True)
    unfit: ClassVar[str] = "a lost stage becomes the mean of its neighbours"

    lr_scale: Annotated[float, Field(gt=0)] = 1.1
    """a rebuilt stage's learning rate is multiplied by this once"""
    moments: Literal["fresh", "mean", "copy"] = "fresh"
    """its optimizer moments: zero as in the published code; [ours] the neighbours' mean, weighted like the weights, or
    a copy of those of the stage before it"""

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
        moments, clocks = merge_moments(before, after, (omega_before, omega_after), at.decays)
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
        """A neighbour's weight; None where there is nothing to go by."""
        return 1.0


class CheckFree(Uniform):
    """The neighbour whose last gradient was larger weighs more."""

    omega: Literal["l2sq", "l2"] = "l2sq"
    """a neighbour's weight: squared or plain L2 norm of its last gradient"""
    measured: Literal["preclip", "postclip"] = "preclip"
    """whether that norm is taken before or after clipping"""

    def _omega(self, donor: StageState) -> float | None:
        norm = donor.grad_norm if self.measured == "preclip" else donor.clipped_norm
        return norm if norm is None or self.omega == "l2" else norm * norm
