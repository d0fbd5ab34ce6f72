"""The numbers of a packed state that change from step to step: clocks, learning-rate scales, norms."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor


class PackingError(ValueError):
    """Bytes that should be a stage's state are not; the message says why."""


def clocks_of(given: Tensor | None, names: Collection[str]) -> dict[str, int]:
    """The clocks of the parameters that have moments, from the entry ``clocks``; PackingError when it is not one."""
    if given is None or (given.dtype, given.shape) != (torch.int64, (len(names),)) or bool((given < 0).any()):
        raise PackingError("a packed state has one clock for each parameter with moments, none below zero")
    return dict(zip(sorted(names), given.tolist(), strict=True))


def scales_of(given: Tensor | None, names: Collection[str], stage: float) -> dict[str, float]:
    """The learning-rate scales, from the entry ``scales``, that are not the stage's; PackingError as above."""
    if given is None:
        return {}
    if (given.dtype, given.shape) != (torch.float64, (len(names),)) or not bool(given.isfinite().all()):
        raise PackingError("a packed state has a finite learning-rate scale for each parameter, or one for all")
    return {name: own for name, own in zip(sorted(names), given.tolist(), strict=True) if own != stage}


def numbers_of(given: Tensor | None) -> tuple[float, float | None, float | None]:
    """Learning-rate scale and both norms, of which either may be unknown (NaN)."""
    if given is None or (given.dtype, given.shape) != (torch.float64, (3,)):
        raise PackingError("a packed state has three numbers: its learning-rate scale and two norms")
    scale, *norms = given.tolist()
    if not math.isfinite(scale) or any(map(math.isinf, norms)):
        raise PackingError(f"a packed state has a scale and norms that are finite, not {scale} and {norms}")
    grad_norm, clipped_norm = (None if math.isnan(norm) else norm for norm in norms)
    return scale, grad_norm, clipped_norm
