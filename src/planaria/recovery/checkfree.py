"""CheckFree (arXiv 2506.15461, Algorithm 1): rebuild a lost middle stage as the mean of its neighbours.

No copies are kept. Weights are squared gradient norms, so the neighbour with the larger gradient has more weight. Stage
0 and the first, last and adjacent lost stages lack two neighbours and are refused. The formula is
``neighbour_average.merge``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from planaria.models.state import StageState
from planaria.recovery.base import (
    ONLY_ENDS,
    Copy,
    DamagedReplica,
    RebuildInputs,
    ScaledLearningRate,
    StrategyPlan,
    StrategyRequirements,
)
from planaria.recovery.neighbour_average import merge, merge_moments


class NeighbourMean(ScaledLearningRate):
    """Ablation of CheckFree: weigh both neighbours equally."""

    requirements: ClassVar[StrategyRequirements] = StrategyRequirements(alike=True)
    pretrained_warning: ClassVar[str] = "a lost stage becomes the mean of its neighbours"
    caption: ClassVar[str] = "{donors} send their weights, and the unweighted mean becomes the new {stage}"

    moments: Literal["fresh", "mean", "copy"] = "fresh"
    """optimizer moments of the rebuilt stage: zero, as in the published code; [ours] the neighbours' weighted mean, or
    a copy of the previous stage's"""

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        """Return both neighbours of each lost middle stage."""
        return self._neighbours(lost, lost, replica.stages)

    def _neighbours(self, candidates: Iterable[int], lost: frozenset[int], stages: int) -> StrategyPlan:
        """Return both neighbours of each of the ``candidates`` among the ``lost`` stages, or why it is refused."""
        donors, refused = {}, {}
        for stage in sorted(candidates):
            if why := _refusal(stage, lost, stages):
                refused[stage] = why
            else:
                donors[stage] = (stage - 1, stage + 1)
        return StrategyPlan(donors, refused)

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        return own.part(lambda name: True, moments=self.moments != "fresh")

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        """Merge both neighbours; use the plain mean if either has no gradient norm."""
        before, after = donated[stage - 1], donated[stage + 1]
        omegas = self._omegas(before, after)
        weights = merge(before.weights, after.weights, *omegas)
        if self.moments == "copy":
            return StageState(weights, before.moments, before.clocks, self.lr_scale)
        moments, clocks = merge_moments(before, after, omegas, inputs.decays)
        return StageState(weights, moments, clocks, self.lr_scale)

    def _omegas(self, before: StageState, after: StageState) -> tuple[float, float]:
        """Return the weights of both neighbours; equal ones if either is unknown or both are zero."""
        omega_before = self._omega(before)
        omega_after = self._omega(after)
        if omega_before is not None and omega_after is not None and omega_before + omega_after > 0:
            return omega_before, omega_after
        return 1.0, 1.0

    def _omega(self, donor: StageState) -> float | None:
        """Return a neighbour's weight; None if it is unknown."""
        return 1.0


def _refusal(stage: int, lost: frozenset[int], stages: int) -> str:
    """Return why ``stage`` cannot be rebuilt from two neighbours; empty if it can."""
    if stage == 0:
        return ONLY_ENDS
    if stage in (1, stages):
        which = "first" if stage == 1 else "last"
        return f"stage {stage} is the {which} block stage: one neighbour only"
    if adjacent := sorted(lost & {stage - 1, stage + 1}):
        return f"stages {stage} and {adjacent[0]} are adjacent: each was the other's donor"
    return ""


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
