"""The memory of frames: that of a tensor as bytes, and what frames are received into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planaria.common.memory_pool import MemoryPool
from planaria.runtime.transport.wire import Header

_LARGE = 256 << 10
"""bytes of a frame from which on its memory is kept for the next one of that size"""
_NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64, torch.uint8: np.uint8}


_KEPT = 64 << 20
_take: Callable[[int], Tensor] = MemoryPool(_KEPT).take


def take_from(take: Callable[[int], Tensor], size: int) -> None:
    """From now on, receive frames of this size into what ``take`` gives for it: uint8 [size].

    Frames of other sizes, such as a stage's state, come rarely: page-locked memory is slow to get.
    """
    global _take
    pool = MemoryPool(_KEPT).take

    def chosen(wanted: int) -> Tensor:
        return take(wanted) if wanted == size else pool(wanted)

    _take = chosen


def receive_buffer(header: Header) -> Tensor:
    """An uninitialised tensor for the payload that ``header`` announces."""
    return buffer(header.dtype, header.shape, header.nbytes)


def buffer(dtype: torch.dtype, shape: Sequence[int], size: int) -> Tensor:
    """An uninitialised tensor of ``size`` bytes, to be filled at once."""
    if size >= _LARGE:
        return _take(size).view(dtype).view(tuple(shape))
    if dtype in _NUMPY:  # a frame's worth of time quicker than torch's own
        return torch.from_numpy(np.empty(shape, _NUMPY[dtype]))
    return torch.empty(tuple(shape), dtype=dtype)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any type, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach()
    if tensor.dtype not in _NUMPY:
        flat = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single number may have any stride
    array: Any = flat.numpy()
    return memoryview(array).cast("B")
