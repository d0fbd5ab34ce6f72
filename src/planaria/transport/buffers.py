"""The memory of frames: that of a tensor as bytes, and what frames are received into."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planaria.transport.wire import Header

_LARGE = 256 << 10
"""bytes of a frame from which on its memory is kept for the next one of that size"""
_HUGE = 4 << 20
_MOST_KEPT = 64 << 20
"""bytes that are kept while nobody uses them"""
_NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64, torch.uint8: np.uint8}


class _Pool:
    """Memory for large frames. Touching fresh memory would take about as long as the transfer itself."""

    def __init__(self) -> None:
        self._unused: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def take(self, dtype: torch.dtype, shape: Sequence[int], size: int) -> Tensor:
        """An uninitialised tensor of ``size`` bytes; its memory comes back when nobody uses it any more."""
        try:
            pages = self._unused[size].pop()
        except IndexError:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
        lease = (ctypes.c_char * size).from_buffer(pages)
        weakref.finalize(lease, self._back, pages).atexit = False
        return torch.frombuffer(lease, dtype=dtype).view(tuple(shape))

    def _back(self, pages: mmap.mmap) -> None:
        """May be called in any thread, and in the middle of :meth:`take`: there is no lock to wait for."""
        self._unused[len(pages)].append(pages)
        while sum(size * len(unused) for size, unused in list(self._unused.items())) > _MOST_KEPT:
            largest = max((size for size, unused in list(self._unused.items()) if unused), default=0)
            with contextlib.suppress(IndexError):  # another thread has just taken it
                self._unused[largest].pop()


_POOL = _Pool()


def receive_buffer(header: Header) -> Tensor:
    """An uninitialised tensor for the payload that ``header`` announces."""
    return buffer(header.dtype, header.shape, header.nbytes)


def buffer(dtype: torch.dtype, shape: Sequence[int], size: int) -> Tensor:
    """An uninitialised tensor of ``size`` bytes, to be filled at once."""
    if size >= _LARGE:
        return _POOL.take(dtype, shape, size)
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
