"""CheckFree (arXiv 2506.15461, Algorithm 1): rebuild a lost middle stage as the mean of its neighbours.

No copies are kept. Weights are squared gradient norms, so the neighbour with the larger gradient has more weight. Stage
0 and the first, last and adjacent lost stages lack two neighbours and are refused. The formula is in :func:`merge`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

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

Moments = dict[str, dict[str, Tensor]]


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
        """Return a neighbour's weight, or None if it is unknown."""
        return 1.0


def _refusal(stage: int, lost: frozenset[int], stages: int) -> str:
    """Return why ``stage`` cannot be rebuilt from two neighbours, or an empty string if it can."""
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


def merge(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], omega_before: float, omega_after: float
) -> dict[str, Tensor]:
    """Return CheckFree's mean of two neighbours (arXiv 2506.15461, Algorithm 1, line 3; its second index is a misprint
    for i+1):

        W_i = (ω_{i-1} W_{i-1} + ω_{i+1} W_{i+1}) / (ω_{i-1} + ω_{i+1})

    elementwise over parameters of the same name and shape. With equal ω the result is exactly the plain mean.

    :raises ValueError: if the neighbours differ in names or shapes, or the ω are negative or both zero.
    """
    if before.keys() != after.keys():
        raise ValueError(f"neighbouring stages differ in parameters: {sorted(before.keys() ^ after.keys())}")
    if min(omega_before, omega_after) < 0 or omega_before + omega_after <= 0:
        raise ValueError(f"weights must be non-negative and not both zero: {omega_before}, {omega_after}")
    share = omega_before / (omega_before + omega_after)
    for name in before:
        shape_before, shape_after = list(before[name].shape), list(after[name].shape)
        if shape_before != shape_after:
            raise ValueError(f"{name} is {shape_before} in one neighbour, {shape_after} in the other")
    return {name: share * before[name] + (1.0 - share) * after[name] for name in before}


def merge_moments(
    before: StageState, after: StageState, omegas: tuple[float, float], decays: Mapping[str, float]
) -> tuple[Moments, dict[str, int]]:
    """Return the same mean of the neighbours' optimizer moments, and the clocks to use with them. [not in the paper]

    AdamW divides a moment by 1 − β^t; ``decays`` has the β of each such tensor. Neighbours may have different t: each
    moment is corrected with its own clock, averaged, and uncorrected with T = max(t), which is returned. With equal
    clocks, and for tensors without β, it is the plain weighted mean. If either neighbour has no moments, return none.

    :raises ValueError: if the neighbours differ in names or shapes.
    """
    if not (before.moments and after.moments):
        return {}, {}
    latest = {name: max(side.clocks.get(name, 0) for side in (before, after)) for name in before.clocks | after.clocks}

    def at_latest_clock(side: StageState, key: str) -> dict[str, Tensor]:
        held = {name: tensors[key] for name, tensors in side.moments.items()}
        if (beta := decays.get(key)) is None:
            return held
        corrected = {name: (1.0 - beta ** latest[name]) / (1.0 - beta**clock) for name, clock in side.clocks.items()}
        return {name: tensor * corrected[name] for name, tensor in held.items()}

    kinds = next(iter(before.moments.values())).keys()
    merged = {key: merge(at_latest_clock(before, key), at_latest_clock(after, key), *omegas) for key in kinds}
    return {name: {key: merged[key][name] for key in kinds} for name in latest}, latest
