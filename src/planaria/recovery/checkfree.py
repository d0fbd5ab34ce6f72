"""CheckFree (arXiv 2506.15461, Algorithm 1): rebuild a lost middle stage as the mean of its neighbours.

No copies are kept. Weights are squared gradient norms, so the neighbour with the larger gradient has more weight. Stage
0 and the first, last and adjacent lost stages lack two neighbours and are refused. The formula is
``neighbour_average.merge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from planaria.models.state import StageState
from planaria.recovery.base import Copy, DamagedReplica, RebuildInputs, RebuildPlan, Recovery, StrategyRequirements
from planaria.recovery.neighbour_average import merge, merge_moments


class NeighbourMean(Recovery):
    """Ablation of CheckFree: weigh both neighbours equally."""

    requirements: ClassVar[StrategyRequirements] = StrategyRequirements(alike=True)
    pretrained_warning: ClassVar[str] = "a lost stage becomes the mean of its neighbours"
    caption: ClassVar[str] = "{donors} send their weights, and the unweighted mean becomes the new {stage}"

    lr_scale: Annotated[float, Field(gt=0)] = 1.1
    """factor on the learning rate of a rebuilt stage from then on; further rebuilds do not compound it"""
    moments: Literal["fresh", "mean", "copy"] = "fresh"
    """optimizer moments of the rebuilt stage: zero, as in the published code; [ours] the neighbours' weighted mean, or
    a copy of the previous stage's"""

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> RebuildPlan:
        """Return both neighbours of each lost middle stage."""
        donors, refused = {}, {}
        for stage in sorted(lost):
            if why := self._refuses(stage, lost, replica.stages):
                refused[stage] = why
            else:
                donors[stage] = (stage - 1, stage + 1)
        return RebuildPlan(donors, refused)

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        return own.part(lambda name: True, moments=self.moments != "fresh")

    def rebuild(self, stage: int, donated: Mapping[int, StageState], at: RebuildInputs) -> StageState:
        """Merge both neighbours; use the plain mean if either has no gradient norm."""
        before, after = donated[stage - 1], donated[stage + 1]
        omegas = self._omega(before), self._omega(after)
        omega_before, omega_after = omegas if None not in omegas and sum(filter(None, omegas)) > 0 else (1.0, 1.0)
        assert omega_before is not None and omega_after is not None
        weights = merge(before.weights, after.weights, omega_before, omega_after)
        if self.moments == "copy":
            return StageState(weights, before.moments, before.clocks, self.lr_scale)
        moments, clocks = merge_moments(before, after, (omega_before, omega_after), at.decays)
        return StageState(weights, moments, clocks, self.lr_scale)

    def _refuses(self, stage: int, lost: frozenset[int], stages: int) -> str:
        """Return why ``stage`` cannot be rebuilt; empty if it can."""
        if stage == 0:
            return "the ends worker (stage 0) holds the only embedding and head"
        if stage in (1, stages):
            which = "first" if stage == 1 else "last"
            return f"stage {stage} is the {which} block stage: one neighbour only"
        if adjacent := sorted(lost & {stage - 1, stage + 1}):
            return f"stages {stage} and {adjacent[0]} are adjacent: each was the other's donor"
        return ""

    def _omega(self, donor: StageState) -> float | None:
        """Return a neighbour's weight; None if it is unknown."""
        return 1.0


class CheckFree(NeighbourMean):
    """Weigh neighbours by the norm of their last gradient."""

    caption: ClassVar[str] = "{donors} send their weights, and the weighted mean becomes the new {stage}"
    advised_variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}}

    omega: Literal["l2sq", "l2"] = "l2sq"
    """weight of a neighbour: squared or plain L2 norm of its last gradient"""
    measured: Literal["preclip", "postclip"] = "preclip"
    """whether the norm is taken before or after clipping"""

    def _omega(self, donor: StageState) -> float | None:
        norm = donor.grad_norm if self.measured == "preclip" else donor.clipped_norm
        return norm if norm is None or self.omega == "l2" else norm * norm
