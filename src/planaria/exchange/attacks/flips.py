"""Attacks that turn a vector round, or leave nothing of it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from planaria.exchange.attacks.base import Scene, Strength, VectorAttack


class SignFlip(VectorAttack):
    """−c · mean of the honest vectors (arXiv 1803.01498 and others)."""

    listens: ClassVar[bool] = True

    strength: Strength = 10.0
    """c"""

    def vector(self, scene: Scene) -> Tensor:
        return -self.strength * mean(scene)


class OwnFlip(VectorAttack):
    """−c · the own vector: nothing has to be known of others."""

    strength: Strength = 10.0
    """c"""

    def vector(self, scene: Scene) -> Tensor:
        return -self.strength * scene.own


class Zero(VectorAttack):
    """Nothing but zeros."""

    def vector(self, scene: Scene) -> Tensor:
        return torch.zeros_like(scene.own)


def mean(scene: Scene) -> Tensor:
    """Of what honest members say."""
    return torch.stack([*scene.known.values()]).mean(dim=0)
