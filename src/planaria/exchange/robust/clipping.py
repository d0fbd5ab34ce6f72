"""Centered clipping (arXiv 2012.10333): from the last value on, towards each member, but not further than τ."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from planaria.bounds import Positive
from planaria.exchange.robust.base import GramRule


class CenteredClipping(GramRule):
    """v ← v + (1/n) Σ (x_j − v) min(1, τ/‖x_j − v‖) (arXiv 2012.10333, section 4), so many times.

    The last value v is a part of the outer state. It has to be equal at all members.
    """

    continues: ClassVar[bool] = True

    rounds: Positive = 1
    """of clipping in one round of the exchange"""
    tau: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """τ; 'auto': the median of the distances ‖x_j − v‖, anew in each round"""

    def least(self) -> int:
        return 2 * self.liars + 1

    def coefficients(self, gram: Tensor) -> Tensor:
        """Of x_j − v, with v the last value: those of the value found, less v."""
        c = torch.zeros(len(gram), dtype=gram.dtype)
        for _ in range(self.rounds):
            # With y_j = x_j − v and v + Σ c_k y_k in place of v: ‖y_j − Σ c_k y_k‖² = K_jj − 2(Kc)_j + cᵀKc
            apart = (gram.diagonal() - 2 * (gram @ c) + c @ gram @ c).clamp(min=0.0).sqrt()
            tau = float(apart.median()) if self.tau == "auto" else self.tau
            step = torch.where(apart > tau, tau / apart, torch.ones_like(apart)) / len(gram)
            c = c + step - float(step.sum()) * c
        return c
