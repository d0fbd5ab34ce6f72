"""A recovery strategy of your own: CheckFree, with noise on what it rebuilds.

cd examples
planaria train demo --allow-code --recovery.strategy own_strategy:Noisy --recovery.options.noise 0.02
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field

from planaria.models.state import StageState
from planaria.recovery.base import RebuildInputs
from planaria.recovery.checkfree import CheckFree


class Noisy(CheckFree):
    """Its fields are its options; those of CheckFree are there too."""

    noise: float = Field(0.0, ge=0)

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        rebuilt, generator = super().rebuild(stage, donated, inputs), torch.Generator().manual_seed(stage)
        for weight in rebuilt.weights.values():
            weight += self.noise * weight.std() * torch.randn(weight.shape, generator=generator)
        return rebuilt
