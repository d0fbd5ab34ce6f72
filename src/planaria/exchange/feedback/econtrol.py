"""EControl (arXiv 2311.05645): an estimate as in EF21, and the error fed back under control of η."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from planaria.exchange.base import Outer, Parts, Weights
from planaria.exchange.feedback.base import full
from planaria.exchange.feedback.estimates import Estimates


class EControl(Estimates):
    """D = C(ηe + g − h); e ← e + g − h − D; h ← h + D; h̄ ← h̄ + mean D.

    Weights that step along h̄ and weights that step along the mean gradient differ by −γ times the mean of e, exactly.

    The theory asks for η = Θ(δ). A compressor that guarantees no δ is measured for each message, on both vectors that
    it has to carry: δ = min(δ(g − h), δ(e)). η concerns the sender alone, so members need not agree about it.
    """

    force: bool = False
    """allow an eta above the compressor's δ, where errors may grow without bound"""
    eta: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """weight of the error in a message; auto: half of the compressor's δ. A number is lowered to a measured δ below it,
    unless ``force`` is set"""

    @property
    def parts(self) -> Parts:
        return {**super().parts, "residual": "own"}

    def meant(self, outer: Outer, exact: Weights, delta: float) -> dict[str, Tensor]:
        eta = delta / 2 if self.eta == "auto" else self.eta if self.force else min(self.eta, delta)
        ahead = _ahead(outer, exact)
        return {name: ahead[name].add_(outer["residual"].get(name, 0.0), alpha=eta) for name in ahead}

    def judged(self, outer: Outer, exact: Weights) -> Sequence[Weights]:
        return _ahead(outer, exact), outer["residual"]

    def kept(self, outer: Outer, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        ahead = _ahead(outer, exact)
        residual = {name: outer["residual"].get(name, 0.0) + ahead[name] - sent[name] for name in sent}
        return {"residual": residual, "estimate": {name: outer["estimate"][name] + sent[name] for name in sent}}

    def misfit(self, delta: float) -> str:
        if self.eta == "auto" or self.eta <= delta or self.force:
            return ""
        return (
            f"eta = {self.eta:g} is above the compressor's delta = {delta:.3g}, where errors may grow without bound; "
            'lower it, take "auto", or set force = true'
        )


def _ahead(outer: Outer, exact: Weights) -> dict[str, Tensor]:
    """g − h"""
    return {name: full(g) - outer["estimate"][name] for name, g in exact.items()}
