"""Snapshots at a worker whose memory is bad: after a step's commit, one bit of a parity changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from planaria.recovery.base import Copy, Holder, Original
from planaria.recovery.parity import ParityHolder
from planaria.recovery.snapshot import Snapshot


class BadMemory(Snapshot):
    at: int = 3
    """the stage whose worker has it"""
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
