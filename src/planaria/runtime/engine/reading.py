"""How long a worker waits for its batches, told apart from what it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torch import Tensor

from planaria.common.errors import UserError
from planaria.faults.trace import Fault
from planaria.runtime.engine.batches import Batch
from planaria.runtime.engine.resolved import ResolvedRun


class Reading:
    """Batches as they are read by the main thread, with the seconds that this takes. A fault makes them come late."""

    def __init__(self, late_s: Callable[[], float] = lambda: 0.0) -> None:
        """``late_s``: how much later a batch is to come now."""
        self._late_s = late_s
        self.step_s = 0.0
        """what the batches of the present step have taken"""
        self._untold_s = 0.0

    def of(self, batch: Batch) -> Batch:
        """The same, for a step that begins: who asks for a microbatch again does not wait for it again."""
        self.step_s, there = 0.0, set[int]()

        def read(microbatch: int) -> tuple[Tensor, Tensor]:
            began = time.monotonic()
            if microbatch not in there:
                time.sleep(self._late_s())
            there.add(microbatch)
            found = batch(microbatch)
            took = time.monotonic() - began
            self.step_s, self._untold_s = self.step_s + took, self._untold_s + took
            return found

        return read

    def newly(self) -> float:
        """Seconds of reading since this was asked last."""
        took, self._untold_s = self._untold_s, 0.0
        return took


def require_readers(resolved: ResolvedRun, faults: Iterable[Fault], where: str) -> None:
    """:raises UserError: when one of the faults, from ``where``, delays batches of a node that reads none."""
    stage_of = resolved.arrangement.stage
    readers = [node for node in sorted(stage_of) if not stage_of[node] or resolved.config.data.document_mask]
    for fault in faults:
        if fault.signal == "slow_data" and fault.stage not in readers:
            raise UserError(
                f"{where}: a fault 'slow_data' at {fault.stage}, which reads no batches; name one of these: "
                f"{', '.join(map(str, readers))}"
            )
