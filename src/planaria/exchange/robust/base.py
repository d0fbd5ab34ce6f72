"""Interface of robust rules: one value of n members' values, of which at most f are Byzantine.

Most rules only need inner products K = XXᵀ: their value is Σ c_j x_j with coefficients c computed from K
(:class:`GramRule`). Two treat each coordinate separately (:class:`CoordinateRule`). Vectors are visited in chunks, so
that no temporary of their size is allocated except the value.

Rules are stateless. An iterative rule receives its last value v as an argument (:attr:`GramRule.is_iterative`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from planaria.config.bounds import Natural
from planaria.config.registry import Choice


class RobustRule(Choice, ABC):
    """A robust rule; its fields are its options. It is pure: equal vectors in the same order have the same value."""

    former: ClassVar[Mapping[str, str]] = {"liars": "byzantine"}
    former_members: ClassVar[Mapping[str, str]] = {"least": "min_members"}
    byzantine: Natural = 1
    """f, the number of Byzantine members tolerated"""

    def min_members(self) -> int:
        """Return the minimum number of members that tolerates f Byzantine ones; by default 2f + 1, a majority."""
        return 2 * self.byzantine + 1


class GramRule(RobustRule, ABC):
    """A rule that only uses inner products."""

    former_members: ClassVar[Mapping[str, str]] = {**RobustRule.former_members, "continues": "is_iterative"}
    origin: ClassVar[bool] = False
    """whether coefficients depend on directions from the origin; otherwise on distances, and K is about a point among
    the vectors, where rounding is least"""
    is_iterative: ClassVar[bool] = False
    """whether it continues from its last value v, initially zero; then K is about v, and the value is v + Σ c_j (x_j −
    v)"""

    @abstractmethod
    def coefficients(self, gram: Tensor) -> Tensor:
        """Return c [n] for K [n, n], both fp64; they sum to 1 unless the rule has an ``origin`` or is iterative."""


class CoordinateRule(RobustRule, ABC):
    """A rule that treats each coordinate separately."""

    @abstractmethod
    def combine(self, rows: Sequence[Tensor]) -> Tensor:
        """Return one value [d] of n members' vectors [d]; a new tensor.

        :raises NotFinite: if a number is not finite.
        """


def squared_distances(gram: Tensor) -> Tensor:
    """Return ‖x_i − x_j‖² [n, n] from K, at least zero; an infinite vector affects only its own pairs."""
    sizes = gram.diagonal()
    return (sizes.unsqueeze(0) + sizes.unsqueeze(1) - 2 * gram).clamp_(min=0.0).fill_diagonal_(0.0)


def nearest_members(gram: Tensor, count: int) -> Tensor:
    """Return for each member the ``count`` nearest members, itself first: [n, count]."""
    distances = squared_distances(gram).fill_diagonal_(-1.0)
    return torch.sort(distances, dim=1, stable=True).indices[:, :count]
