"""EF21 (arXiv 2106.05203): what is sent is the difference to an estimate, which all can follow."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from planaria.exchange.base import Outer, Parts, Weights
from planaria.exchange.feedback.base import full
from planaria.exchange.feedback.estimates import Estimates


class EF21(Estimates):
    """D = C(v − h), h ← h + D, h̄ ← h̄ + mean D, with v ← (1 − a)v + ag, or v = g without momentum."""

    momentum: Annotated[float, Field(gt=0, le=1)] = 1.0
    """a, the share of the new gradient in what is followed (arXiv 2305.15155); 1: no momentum"""

    @property
    def parts(self) -> Parts:
        return {**super().parts, **({} if self.momentum == 1.0 else {"followed": "estimate"})}

    def meant(self, outer: Outer, exact: Weights, delta: float) -> dict[str, Tensor]:
        return {name: v - outer["estimate"][name] for name, v in self._followed(outer, exact).items()}

    def kept(self, outer: Outer, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        estimate = {name: outer["estimate"][name] + sent[name] for name in sent}
        followed = {} if self.momentum == 1.0 else {"followed": self._followed(outer, exact)}
        return {"estimate": estimate, **followed}

    def begun(self, exact: Weights) -> dict[str, Weights]:
        own = super().begun(exact)
        return own if self.momentum == 1.0 else {**own, "followed": own["estimate"]}

    def _followed(self, outer: Outer, exact: Weights) -> dict[str, Tensor]:
        """v ← (1 − a)v + ag (arXiv 2305.15155, algorithm 1)."""
        a = self.momentum
        if a == 1.0:
            return {name: full(g) for name, g in exact.items()}
        return {name: (1.0 - a) * outer["followed"][name] + a * full(g) for name, g in exact.items()}
