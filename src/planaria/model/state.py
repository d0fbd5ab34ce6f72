"""Everything of a stage that outlives a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class StageState:
    """A stage's weights and what its optimizer knows, by local parameter name.

    ``moments`` maps a parameter to AdamW's (first, second) moment; empty before the first update. ``updates`` counts
    the optimizer's steps since the stage was (re)born, ``lr_scale`` multiplies its learning rate. The norms (L2, before
    and after clipping) are those of the last committed gradient; None when there is none yet. ``rng`` is the state of
    the holder's CPU generator.
    """

    weights: dict[str, Tensor]
    moments: dict[str, tuple[Tensor, Tensor]]
    updates: int
    lr_scale: float
    grad_norm: float | None = None
    clipped_norm: float | None = None
    rng: Tensor | None = None
