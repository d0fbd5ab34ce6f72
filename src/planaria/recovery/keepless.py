"""What strategies have in common that keep nothing before a failure."""

from __future__ import annotations

from collections.abc import Mapping

from planaria.model.state import Shapes
from planaria.recovery.base import Copy, CopyCost, Holder, Original, Sender


class Keepless:
    """No copies, so no keepers."""

    def copies(self, stages: int) -> tuple[Copy, ...]:
        return ()

    def sender(self, copy: Copy, stage: int) -> Sender:
        raise LookupError(f"nothing is kept of stage {stage}")

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        raise LookupError(f"nothing is kept of stages {copy.sources}")

    def cost(self, copy: Copy, shapes: Mapping[int, Shapes]) -> CopyCost:
        raise LookupError(f"nothing is kept of stages {copy.sources}")
