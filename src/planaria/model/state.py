"""Everything of a stage that outlives a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class StageState:
    """A stage's weights and what its optimizer knows, by local parameter name.

    ``moments`` maps a parameter to AdamW's (first, second) moment; empty before the first update. ``updates`` counts
    the optimizer's steps since the stage was (re)born, ``lr_scale`` multiplies its learning rate. The norms (L2, before
    and after clipping) are those of the last committed gradient; None when there is none yet. ``rng`` is the state of
    the holder's CPU generator. ``outer`` is what replicas keep from round to round (``exchange.base.Outer.state``).
    """

    weights: dict[str, Tensor]
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    updates: int = 0
    lr_scale: float = 1.0
    grad_norm: float | None = None
    clipped_norm: float | None = None
    rng: Tensor | None = None
    outer: dict[str, Tensor] = field(default_factory=dict)

    def part(self, wanted: Callable[[str], bool], moments: bool) -> StageState:
        """The ``wanted`` parameters only, with their moments or without; shares memory, leaves the generator out."""
        weights = {name: tensor for name, tensor in self.weights.items() if wanted(name)}
        kept = {name: pair for name, pair in self.moments.items() if moments and wanted(name)}
        return StageState(weights, kept, self.updates, self.lr_scale, self.grad_norm, self.clipped_norm)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and moments."""
        pairs = [tensor for pair in self.moments.values() for tensor in pair]
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *pairs))
