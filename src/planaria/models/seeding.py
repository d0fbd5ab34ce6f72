"""Seeds and generators derived from names, so that every worker, cut and version draws the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seed_of(text: str) -> int:
    """Return a 64-bit seed derived from a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def generator(seed: int, name: str) -> torch.Generator:
    """Return the CPU generator of the parameter or table ``name``."""
    return torch.Generator().manual_seed(seed_of(f"{seed} {name}"))


def normal(shape: Sequence[int], std: float, seed: int, name: str) -> Tensor:
    """Return numbers from N(0, std²), fp32."""
    return torch.empty(tuple(shape)).normal_(0.0, std, generator=generator(seed, name))
