"""Which samples a microbatch is made of: a pure function of the step, never of who computes it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from planaria.data.stream import Stream

Batch = Callable[[int], tuple[Tensor, Tensor]]
"""microbatch → (tokens, targets), both [microbatch_size, context] int64"""


def batches(stream: Stream, first_sample: int, size: int) -> Batch:
    """Microbatch ``i`` holds samples ``first_sample + i * size`` and the ``size - 1`` after it."""

    def batch(microbatch: int) -> tuple[Tensor, Tensor]:
        return stream.batch(first_sample + microbatch * size, size)

    return batch
