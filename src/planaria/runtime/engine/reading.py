"""How long a worker waits for its batches, told apart from what it computes."""

from __future__ import annotations

import time

from torch import Tensor

from planaria.runtime.engine.batches import Batch


class Reading:
    """Batches as they are read by the main thread, with the seconds that this takes."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """seconds that the batches of the present step have taken"""
        self._unreported_s = 0.0

    def of(self, batch: Batch) -> Batch:
        """Return the same batch, timed, for a step that begins."""
        self.step_s = 0.0

        def read(microbatch: int) -> tuple[Tensor, Tensor]:
            began = time.monotonic()
            found = batch(microbatch)
            took = time.monotonic() - began
            self.step_s, self._unreported_s = self.step_s + took, self._unreported_s + took
            return found

        return read

    def newly(self) -> float:
        """Return the seconds of reading since the last call."""
        took, self._unreported_s = self._unreported_s, 0.0
        return took
