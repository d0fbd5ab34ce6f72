"""Attacks by chance."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from planaria.exchange.attacks.base import Scene, Strength, VectorAttack


class Random(VectorAttack):
    """A direction drawn from a normal distribution, c times as long as the own vector."""

    strength: Strength = 10.0
    """c"""

    def vector(self, scene: Scene) -> Tensor:
        noise = torch.randn(scene.own.shape, generator=scene.generator)
        length = self.strength * float(scene.own.norm())
        return noise * (length / float(noise.norm()))


class Equivocate(Random):
    """Another such vector to each peer, as long as the own one unless said otherwise."""

    equivocates: ClassVar[bool] = True

    strength: Strength = 1.0
    """c"""
