"""What methods have in common in which members follow each other's estimates."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

from planaria.exchange.base import Outer, Parts, Weights
from planaria.exchange.feedback.base import Feedback, full


class Estimates(Feedback, ABC):
    """``estimate`` is h_i, ``mean_estimate`` h̄. Both begin with a round in which exact vectors are sent: h_i = g_i."""

    estimates: ClassVar[bool] = True

    @property
    def parts(self) -> Parts:
        return {"estimate": "estimate", "mean_estimate": "shared"}

    def reached(self, outer: Outer, joined: Weights) -> tuple[Weights, dict[str, Weights]]:
        """h̄ ← h̄ + mean D, which is what members go on with."""
        mean = {name: outer["mean_estimate"][name] + tensor for name, tensor in joined.items()}
        return mean, {"mean_estimate": mean}

    def begun(self, exact: Weights) -> dict[str, Weights]:
        return {"estimate": {name: full(g).clone() for name, g in exact.items()}}

    def shared(self, joined: Weights) -> dict[str, Weights]:
        return {"mean_estimate": joined}
