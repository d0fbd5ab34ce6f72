"""What every robust rule answers: one value of those that n members say, of whom at most f lie.

Rules are of two kinds. Most need nothing of the vectors but their inner products, K = XXᵀ: their value is Σ c_j x_j
with coefficients c that follow from K (:class:`GramRule`). Two look at each coordinate by itself
(:class:`CoordinateRule`). Vectors are visited in chunks, so that nothing of their size is made but the value.

A rule keeps nothing. One that goes on from its last value, v, is given it again (:attr:`GramRule.continues`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from planaria.config.bounds import Natural
from planaria.config.registry import Choice


class Rule(Choice, ABC):
    """One way; its fields are its options. Pure: all who have the same vectors in the same order get the same value."""

    liars: Natural = 1
    """f, the members that may lie"""

    def least(self) -> int:
        """Return the fewest members with which the rule tolerates f liars; 2f + 1, an honest majority, by default."""
        return 2 * self.liars + 1


class GramRule(Rule, ABC):
    """Goes by inner products alone."""

    origin: ClassVar[bool] = False
    """Do its coefficients go by directions from the origin? If not, by distances, and K may be about any point: then
    it is about one that lies among the vectors, where rounding is least."""
    continues: ClassVar[bool] = False
    """Does it go on from its last value v, zero at first? Then K is about v, and the value is v + Σ c_j (x_j − v)."""

    @abstractmethod
    def coefficients(self, gram: Tensor) -> Tensor:
        """c [n] for K [n, n], both fp64; they add up to 1 unless the rule has an ``origin``, or ``continues``."""


class CoordinateRule(Rule, ABC):
    """Looks at each coordinate by itself."""

    @abstractmethod
    def combine(self, rows: Sequence[Tensor]) -> Tensor:
        """One value [d] of the vectors [d] of n members, a new tensor; they stay as they are.

        :raises NotFinite: when a number of them is not.
        """


def distances(gram: Tensor) -> Tensor:
    """‖x_i − x_j‖² [n, n] from K, none below zero; a liar's infinite one stays infinite and touches no other pair."""
    sizes = gram.diagonal()
    return (sizes.unsqueeze(0) + sizes.unsqueeze(1) - 2 * gram).clamp_(min=0.0).fill_diagonal_(0.0)


def nearest(gram: Tensor, count: int) -> Tensor:
    """For each member the ``count`` members nearest to it, itself the first of all: [n, count]."""
    apart = distances(gram).fill_diagonal_(-1.0)
    return torch.sort(apart, dim=1, stable=True).indices[:, :count]
