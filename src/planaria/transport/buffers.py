"""The memory of frames: that of a tensor as bytes, and what frames are received into."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

from planaria.transport.wire import Header

_HUGE = 4 << 20


def receive_buffer(header: Header) -> Tensor:
    """An uninitialised tensor for the payload that ``header`` announces.

    A large one comes from huge pages where the system has them: touching fresh memory 4 KB at a time would take longer
    than the transfer itself.
    """
    if header.nbytes < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(header.shape, dtype=header.dtype)
    pages = mmap.mmap(-1, header.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=header.dtype).view(header.shape)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any type, without a copy."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
