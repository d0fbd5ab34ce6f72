"""The one model that replicas make: what a run of them ends with, and is judged by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planaria.exchange.base import Weights


def consensus(of: Sequence[Weights]) -> dict[str, Tensor]:
    """The mean of the replicas' fast weights, in fp32, parameter by parameter (arXiv 2506.10911 names no one model)."""
    return {name: torch.stack([weights[name].float() for weights in of]).mean(dim=0) for name in of[0]}
