"""The control that loses a struck stage's AdamW moments and clocks, and nothing else.

Every rule that rebuilds a stage from weights alone leaves its optimizer fresh. AdamW then starts over: with m = v = 0
and its bias correction, the first update of each weight has the size of the learning rate, lr · g / (|g| + ε). That
alone may speed a run up or slow it down, and says nothing of how well a stage was rebuilt. So such rules are held
against this one.
"""

from __future__ import annotations

from typing import ClassVar

from planaria.models.state import StageState
from planaria.recovery.simulated import Simulated


class Reset(Simulated):
    """Weights, learning-rate scales and norms are left."""

    control: ClassVar[str] = "gives back the weights that a death destroys"

    def left(self, before: StageState) -> StageState:
        return before.part(lambda name: True, moments=False)
