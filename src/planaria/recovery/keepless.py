"""What strategies have in common that keep nothing before a failure."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from planaria.recovery.base import Copy, CopyCost, Holder, Original, Sender


class Keepless:
    """No copies, so no keepers."""

    def copies(self, stages: int) -> tuple[Copy, ...]:
        return ()

    def keeper(self, copy: Copy, original: Original) -> tuple[Sender, Holder]:
        raise LookupError(f"nothing is kept of stage {copy.stage}")

    def cost(self, copy: Copy, shapes: Mapping[str, torch.Size]) -> CopyCost:
        raise LookupError(f"nothing is kept of stage {copy.stage}")
