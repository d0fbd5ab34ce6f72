"""Nothing is made up for, or what a message lacks is sent later: error feedback of 2014."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from planaria.exchange.base import Outer, Parts, Weights
from planaria.exchange.feedback.base import Feedback, full


class Naive(Feedback):
    """D = C(g). What a message lacks is lost; with top-k this may diverge (arXiv 2002.12410, example 1)."""

    @property
    def parts(self) -> Parts:
        return {}

    def meant(self, outer: Outer, exact: Weights, delta: float) -> dict[str, Tensor]:
        return {name: full(tensor) for name, tensor in exact.items()}

    def kept(self, outer: Outer, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        return {}


class EF14(Feedback):
    """D = C(e + g), e ← e + g − D: the error is fed back and stays bounded.

    Source: Seide et al. (2014) and Karimireddy et al. (arXiv 1901.09847, algorithm 2), at the sender, without decay.
    """

    @property
    def parts(self) -> Parts:
        return {"residual": "own"}

    def meant(self, outer: Outer, exact: Weights, delta: float) -> dict[str, Tensor]:
        return {name: full(tensor) + outer["residual"].get(name, 0.0) for name, tensor in exact.items()}

    def kept(self, outer: Outer, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        return {"residual": {name: meant[name] - sent[name] for name in meant}}

    def alone(self, kept: Mapping[str, Weights], sent: Weights) -> tuple[Weights, Mapping[str, Weights]]:
        """Nothing is owed to anybody."""
        residual = kept["residual"]
        return (
            {name: sent[name] + residual[name] for name in residual},
            {"residual": {name: torch.zeros_like(tensor) for name, tensor in residual.items()}},
        )
