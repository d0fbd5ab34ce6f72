"""Replicas with wrong sums or damaged memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from planaria.exchange.allreduce import AllReduce
from planaria.exchange.base import StageOuterState, Update, Weights
from planaria.recovery.base import Copy, Holder, Original
from planaria.recovery.parity import ParityHolder
from planaria.recovery.snapshot import Snapshot


class WrongSum(AllReduce):
    """AllReduce with a wrong sum at one replica in one step."""

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


class BadMemory(Snapshot):
    """Snapshots at a worker with bad memory: after a step's commit, one bit of a parity changes."""

    at: int = 3
    """stage of that worker"""
    step: int = 4

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        held = super().holder(copy, originals)
        if isinstance(held, ParityHolder) and copy.host == self.at:
            plain = held.commit

            def commit(step: int) -> None:
                plain(step)
                if step == self.step:
                    assert held.intact()
                    (*_, part) = held.state().weights.values()
                    part.view(torch.uint8)[len(part) // 2] ^= 1

            held.commit = commit
        return held
