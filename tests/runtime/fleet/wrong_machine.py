"""An all-reduce in which one replica computes wrongly, once: the least that a broken machine does."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from planaria.exchange.allreduce import AllReduce
from planaria.exchange.base import StageOuterState, Update, Weights


class Wrong(AllReduce):
    """As AllReduce, but for one replica's sum in one step."""

    replica: int = 0
    step: int = 0

    def settle(
        self, outer: StageOuterState, fast: Weights, updates: Mapping[int, Update], me: int
    ) -> tuple[dict[str, Tensor], StageOuterState]:
        gradients, after = super().settle(outer, fast, updates, me)
        if (me, outer.rounds) == (self.replica, self.step):
            first = next(iter(gradients))
            gradients[first] = gradients[first] + 1e-6
        return gradients, after
