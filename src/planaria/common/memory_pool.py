"""A pool of large memory: touching fresh pages takes about as long as filling them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections import defaultdict

import torch
from torch import Tensor

_HUGE = 4 << 20
_TRIM_THRESHOLD = -1
"""parameter of ``mallopt`` (mallopt(3)): M_TRIM_THRESHOLD"""
_MMAP_THRESHOLD = -3
"""parameter of ``mallopt``: M_MMAP_THRESHOLD"""
_USER_SETTINGS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}


def trim() -> None:
    """Return free memory to the system: glibc keeps that of finished threads. The call has no effect without glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> bool:
    """Keep freed memory in the process, in pieces below 32 MB, for the next training step; return whether that is in
    effect.

    By default glibc returns much of it, and fresh pages in the next pass cost some percent of a step. The call has no
    effect if the environment sets malloc's thresholds, or without glibc.
    """
    if _USER_SETTINGS & os.environ.keys():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20) and mallopt(_TRIM_THRESHOLD, 1 << 30))


class MemoryPool:
    """Allocates memory, and keeps some unused memory for later requests of the same size."""

    def __init__(self, max_unused: int) -> None:
        """:param max_unused: maximum bytes kept while unused."""
        self._max_unused = max_unused
        self._unused: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """Return an uninitialised uint8 tensor [size], size > 0; its memory returns to the pool when it is
        unreferenced."""
        try:
            pages = self._unused[size].pop()
        except IndexError:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
        lease = (ctypes.c_char * size).from_buffer(pages)
        weakref.finalize(lease, self._return, pages).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _return(self, pages: mmap.mmap) -> None:
        """Take memory back. Lock-free, as it may run in any thread, even within :meth:`take`."""
        self._unused[len(pages)].append(pages)
        while sum(size * len(unused) for size, unused in list(self._unused.items())) > self._max_unused:
            largest = max((size for size, unused in list(self._unused.items()) if unused), default=0)
            with contextlib.suppress(IndexError):  # another thread has just popped it
                self._unused[largest].pop()
