"""Weighted means of neighbouring stages: of weights (CheckFree's formula) and of optimizer moments."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from planaria.models.state import StageState

Moments = dict[str, dict[str, Tensor]]


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
