"""Which samples a microbatch is made of: a pure function of the step, never of who computes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from planaria.config.schema import DataConfig
from planaria.data.stream import Stream
from planaria.models.llama import document_mask

Batch = Callable[[int], tuple[Tensor, Tensor]]
"""microbatch → (tokens, targets), both [microbatch_size, context] int64"""
Masks = Callable[[int], Tensor]
"""microbatch → which of its tokens see which, bool [microbatch_size, 1, context, context]"""


def batches(stream: Stream, first_sample: int, size: int) -> Batch:
    """Microbatch ``i`` holds samples ``first_sample + i * size`` and the ``size - 1`` after it."""

    def batch(microbatch: int) -> tuple[Tensor, Tensor]:
        return stream.batch(first_sample + microbatch * size, size)

    return batch


def masks(data: DataConfig, stream: Stream, batch: Batch) -> Masks | None:
    """What keeps the documents of a ``batch`` of ``stream`` apart; None if they are not to be.

    Every stage makes it from the samples themselves: it need not be sent, and follows from the step as they do.
    """
    return (lambda microbatch: document_mask(batch(microbatch)[0], stream.separator)) if data.document_mask else None


def placed(tensor: Tensor, device: str) -> Tensor:
    """Return a host tensor on ``device``; a copy to a GPU is asynchronous, from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor
