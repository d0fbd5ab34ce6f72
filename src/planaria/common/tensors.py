"""Checks of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(numbers: Tensor) -> bool:
    """Return whether all numbers are finite.

    NaN and infinity carry over to the minimum or maximum, which is one pass and makes no mask as ``isfinite`` does.
    """
    return not numbers.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(numbers))).all())
