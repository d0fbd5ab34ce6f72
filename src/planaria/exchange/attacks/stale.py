"""A member that does not listen to time."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from planaria.exchange.attacks.base import Scene, VectorAttack


class Stale(VectorAttack):
    """What it would have said so many rounds ago; before that, what it would have said when it began to lie. Keeps as
    many vectors."""

    strength: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] = 50.0
    """rounds; parts of one do not count"""

    @property
    def remembers(self) -> int:
        return int(self.strength)

    def vector(self, scene: Scene) -> Tensor:
        return scene.past[0] if scene.past else scene.own
