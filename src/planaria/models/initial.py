"""Random numbers that depend on a seed and a name only, so that every worker, layout and version draws the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def generator(seed: int, name: str) -> torch.Generator:
    """Return the CPU generator of the parameter or table ``name``."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def normal(shape: Sequence[int], std: float, seed: int, name: str) -> Tensor:
    """Return numbers from N(0, std²), fp32."""
    return torch.empty(tuple(shape)).normal_(0.0, std, generator=generator(seed, name))
