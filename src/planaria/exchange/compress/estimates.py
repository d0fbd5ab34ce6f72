"""Error feedback by estimates that all members keep: EF21, EF21-W and EControl.

A message is the difference to an estimate. Sources: arXiv 2106.05203 (EF21), 2402.10774 (EF21-W), 2311.05645 (EControl,
which also feeds the error back, controlled by η).
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from planaria.config.bounds import Positive
from planaria.exchange.base import Parts, StageOuterState, Weights
from planaria.exchange.compress.base import squared_norm
from planaria.exchange.compress.feedback import Feedback, at_least_fp32

MIN_SMOOTHNESS = 1e-3
"""minimum smoothness, as a share of the mean; applies to gradients that hardly changed in the warm-up"""


def member_weights(smoothness: Sequence[float]) -> list[float]:
    """Return w_i = L_i/ΣL_j from each member's smoothness (arXiv 2402.10774, algorithm 2): it compresses g_i/(n w_i),
    which counts n w_i. No proof covers AdamW."""
    return [each / sum(smoothness) for each in smoothness]


def member_scales(smoothness: Sequence[float]) -> list[float]:
    """Return n·w_i, the divisor of member i's vector before compression (arXiv 2402.10774, algorithm 2)."""
    return [len(smoothness) * weight for weight in member_weights(smoothness)]


class Estimates(Feedback, ABC):
    """``estimate`` is h_i, ``mean_estimate`` h̄. Both start in a round of exact vectors: h_i = g_i."""

    estimates: ClassVar[bool] = True

    @property
    def parts(self) -> Parts:
        return {"estimate": "estimate", "mean_estimate": "shared"}

    def result(self, outer: StageOuterState, joined: Weights) -> tuple[Weights, dict[str, Weights]]:
        """Return h̄ ← h̄ + mean D, which members use as the round's mean, and the outer state that holds it."""
        mean = {name: outer["mean_estimate"][name] + tensor for name, tensor in joined.items()}
        return mean, {"mean_estimate": mean}

    def parts_after_start(self, exact: Weights) -> dict[str, Weights]:
        return {"estimate": {name: at_least_fp32(g).clone() for name, g in exact.items()}}

    def shared(self, joined: Weights) -> dict[str, Weights]:
        return {"mean_estimate": joined}


class EF21(Estimates):
    """D = C(v − h), h ← h + D, h̄ ← h̄ + mean D, with v ← (1 − a)v + ag, or v = g without momentum."""

    momentum: Annotated[float, Field(gt=0, le=1)] = 1.0
    """a, the share of the new gradient in v (arXiv 2305.15155); 1: no momentum"""

    @property
    def parts(self) -> Parts:
        return {**super().parts, **({} if self.momentum == 1.0 else {"followed": "estimate"})}

    def target(self, outer: StageOuterState, exact: Weights, delta: float) -> dict[str, Tensor]:
        return {name: v - outer["estimate"][name] for name, v in self._follow(outer, exact).items()}

    def next_parts(self, outer: StageOuterState, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        estimate = {name: outer["estimate"][name] + sent[name] for name in sent}
        followed = {} if self.momentum == 1.0 else {"followed": self._follow(outer, exact)}
        return {"estimate": estimate, **followed}

    def parts_after_start(self, exact: Weights) -> dict[str, Weights]:
        parts = super().parts_after_start(exact)
        return parts if self.momentum == 1.0 else {**parts, "followed": parts["estimate"]}

    def _follow(self, outer: StageOuterState, exact: Weights) -> dict[str, Tensor]:
        """v ← (1 − a)v + ag (arXiv 2305.15155, algorithm 1)."""
        a = self.momentum
        if a == 1.0:
            return {name: at_least_fp32(g) for name, g in exact.items()}
        return {name: (1.0 - a) * outer["followed"][name] + a * at_least_fp32(g) for name, g in exact.items()}


Smoothness = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class EF21W(EF21):
    """D = C((g − h)/s)·s, h ← h + D, h̄ ← h̄ + mean D, with the scale s_i = n·w_i = n·L_i/ΣL_j of replica i.

    In the paper's algorithm 2, h_i follows g_i/s_i and the mean counts s_i. Here h_i is s_i times that: the other
    replicas' weights do not enter a state, and a change of weights needs no conversion. The published step size
    is 1/(L + mean L_i · ξ(δ)) (theorem 3).
    """

    smoothness: Annotated[list[Smoothness], Field(min_length=1)] | Literal["auto"] = "auto"
    """L_i of each replica, in order; auto: estimated in a warm-up from the changes of each replica's gradient"""
    warmup: Positive = 8
    """steps of the warm-up, whose differences are sent uncompressed"""

    def why_members_unsupported(self, members: int) -> str:
        if self.smoothness == "auto" or len(self.smoothness) == members:
            return ""
        return f"smoothness has {len(self.smoothness)} values for exchange.replicas = {members}; set one for each"

    def measuring(self, outer: StageOuterState) -> bool:
        return self.smoothness == "auto" and outer.measured < self.warmup

    def measure(self, outer: StageOuterState, sent: Mapping[int, Weights]) -> StageOuterState:
        """Add ‖Δg_i‖² of this step: L_i = √(Σ‖Δg_i‖²/Σ‖Δx‖²) over the warm-up.

        All replicas have the same parameters, so Σ‖Δx‖² cancels in the weights. They decode the same differences in the
        same order, and NumPy's sums do not depend on the number of threads, so the weights are bit-identical at all
        replicas.
        """
        squares = [_squared_norm(sent[member]) for member in sorted(sent)]
        secants = outer.secants if len(outer.secants) == len(squares) else (0.0,) * len(squares)
        count = outer.measured if secants is outer.secants else 0
        total = tuple(secant + square for secant, square in zip(secants, squares, strict=True))
        return replace(outer, secants=total, measured=count + 1)

    def scale(self, outer: StageOuterState, member: int) -> float:
        if self.measuring(outer):
            return 1.0
        smoothness = estimate_smoothness(outer.secants) if self.smoothness == "auto" else self.smoothness
        return member_scales(smoothness)[member]


def estimate_smoothness(secants: tuple[float, ...]) -> list[float]:
    """Return L_i up to a common factor, from Σ‖Δg_i‖²; all equal if no gradient has changed."""
    estimates = [math.sqrt(each) for each in secants]
    mean = sum(estimates) / len(estimates)
    return [max(each, MIN_SMOOTHNESS * mean) for each in estimates] if mean else [1.0] * len(estimates)


def _squared_norm(weights: Weights) -> float:
    """Return ‖v‖² in fp64."""
    return sum(squared_norm(at_least_fp32(weights[name])) for name in sorted(weights))


class EControl(Estimates):
    """D = C(ηe + g − h); e ← e + g − h − D; h ← h + D; h̄ ← h̄ + mean D.

    Weights that step along h̄ and weights that step along the mean gradient differ by exactly −γ times the mean of e.

    The theory requires η = Θ(δ). For a compressor without a guaranteed δ, it is measured for each message on both
    vectors in it: δ = min(δ(g − h), δ(e)). η concerns the sender only, so members need not agree on it.
    """

    force: bool = False
    """allow an eta above the compressor's δ, where errors may grow without bound"""
    eta: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """weight of the error in a message; auto: half of the compressor's δ. A number is lowered to the measured δ unless
    ``force`` is set"""

    @property
    def parts(self) -> Parts:
        return {**super().parts, "residual": "own"}

    def target(self, outer: StageOuterState, exact: Weights, delta: float) -> dict[str, Tensor]:
        eta = delta / 2 if self.eta == "auto" else self.eta if self.force else min(self.eta, delta)
        difference = _difference(outer, exact)
        return {name: difference[name].add_(outer["residual"].get(name, 0.0), alpha=eta) for name in difference}

    def measured_vectors(self, outer: StageOuterState, exact: Weights) -> Sequence[Weights]:
        return _difference(outer, exact), outer["residual"]

    def next_parts(self, outer: StageOuterState, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        difference = _difference(outer, exact)
        residual = {name: outer["residual"].get(name, 0.0) + difference[name] - sent[name] for name in sent}
        return {"residual": residual, "estimate": {name: outer["estimate"][name] + sent[name] for name in sent}}

    def why_unsupported(self, delta: float) -> str:
        if self.eta == "auto" or self.eta <= delta or self.force:
            return ""
        return (
            f"eta = {self.eta:g} is above the compressor's delta = {delta:.3g}, where errors may grow without bound; "
            'lower it, use "auto", or set force = true'
        )


def _difference(outer: StageOuterState, exact: Weights) -> dict[str, Tensor]:
    """Return g − h."""
    return {name: at_least_fp32(g) - outer["estimate"][name] for name, g in exact.items()}
