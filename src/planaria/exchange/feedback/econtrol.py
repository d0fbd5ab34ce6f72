"""EControl (arXiv 2311.05645): an estimate as in EF21, and the error fed back under control of η."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from planaria.exchange.base import Outer, Parts, Weights
from planaria.exchange.feedback.base import full
from planaria.exchange.feedback.estimates import Estimates


class EControl(Estimates):
    """D = C(ηe + g − h); e ← e + g − h − D; h ← h + D; h̄ ← h̄ + mean D.

    Weights that step along h̄ and weights that step along the mean gradient differ by −γ times the mean of e, exactly.
    """

    force: bool = False
    """go on with an eta above the compressor's δ, where errors may grow without bound"""
    eta: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """how strongly errors are fed back; auto: half of the compressor's δ"""

    @property
    def parts(self) -> Parts:
        return {**super().parts, "residual": "own"}

    def meant(self, outer: Outer, exact: Weights, delta: float) -> dict[str, Tensor]:
        eta = delta / 2 if self.eta == "auto" else self.eta
        ahead = _ahead(outer, exact)
        return {name: ahead[name].add_(outer["residual"].get(name, 0.0), alpha=eta) for name in ahead}

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
