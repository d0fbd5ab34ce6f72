"""CheckFree (arXiv 2506.15461, Algorithm 1): a lost middle stage is the gradient-weighted mean of its neighbours.

Nothing is kept anywhere before the failure. The neighbour whose last gradient was larger has converged less and weighs
more. First, last, adjacent and ends stages have no two neighbours to rebuild from and are out of its reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from planaria.config import RecoveryConfig
from planaria.recovery.base import Donor, Unrecoverable


def merge(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], omega_before: float, omega_after: float
) -> dict[str, Tensor]:
    """CheckFree's rule (Alg. 1 line 3, with its misprinted second index read as i+1):

        W_i = (ω_{i-1} W_{i-1} + ω_{i+1} W_{i+1}) / (ω_{i-1} + ω_{i+1})

    elementwise over parameters of the same name and shape. Equal ω give exactly the plain mean.

    :raises ValueError: when the neighbours differ in names or shapes, or the ω are negative or both zero.
    """
    if before.keys() != after.keys():
        raise ValueError(f"neighbouring stages differ in parameters: {sorted(before.keys() ^ after.keys())}")
    if min(omega_before, omega_after) < 0 or omega_before + omega_after <= 0:
        raise ValueError(f"weights must be non-negative and not both zero: {omega_before}, {omega_after}")
    share = omega_before / (omega_before + omega_after)
    for name in before:
        one, other = list(before[name].shape), list(after[name].shape)
        if one != other:
            raise ValueError(f"{name} is {one} in one neighbour, {other} in the other")
    return {name: share * before[name] + (1.0 - share) * after[name] for name in before}


@dataclass(frozen=True)
class CheckFree:
    """CheckFree's choices: how ω is measured, and what a rebuilt stage's learning rate is multiplied by."""

    omega: Literal["l2sq", "l2"] = "l2sq"
    measured: Literal["preclip", "postclip"] = "preclip"
    lr_scale: float = 1.1

    @classmethod
    def from_config(cls, config: RecoveryConfig) -> CheckFree:
        return cls(config.omega, config.measured, config.lr_scale)

    def donors(self, lost: frozenset[int], stages: int) -> dict[int, tuple[int, ...]] | Unrecoverable:
        """Both neighbours of every lost middle stage; otherwise which stages are beyond rescue, and why."""
        reasons = []
        for stage in sorted(lost):
            if stage == 0:
                reasons.append("the ends worker (stage 0) holds the only embedding and head")
            elif stage in (1, stages):
                which = "first" if stage == 1 else "last"
                reasons.append(f"stage {stage} is the {which} block stage: one neighbour only")
            elif stage + 1 in lost:
                reasons.append(f"stages {stage} and {stage + 1} are adjacent: each was the other's donor")
        if reasons:
            return Unrecoverable(tuple(sorted(lost)), "CheckFree cannot rebuild: " + "; ".join(reasons))
        return {stage: (stage - 1, stage + 1) for stage in sorted(lost)}

    def rebuild(self, stage: int, donors: Mapping[int, Donor]) -> dict[str, Tensor]:
        """The merged weights of ``stage``; the plain mean as long as a neighbour has no gradient to go by."""
        before, after = donors[stage - 1], donors[stage + 1]
        omega_before, omega_after = self._omega(before), self._omega(after)
        if omega_before is None or omega_after is None or omega_before + omega_after == 0:
            omega_before = omega_after = 1.0
        return merge(before.weights, after.weights, omega_before, omega_after)

    def _omega(self, donor: Donor) -> float | None:
        norm = donor.grad_norm if self.measured == "preclip" else donor.clipped_norm
        return norm if norm is None or self.omega == "l2" else norm * norm
