"""Large memory that is used again: touching fresh pages takes about as long as filling them."""

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
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""what ``mallopt`` calls them (mallopt(3))"""
_OF_USERS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}


def trim() -> None:
    """Give the system back what is free: glibc keeps the memory of threads that are done. Elsewhere, nothing."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed() -> bool:
    """Let the process keep what it frees, in pieces below 32 MB: a step of training needs the same memory as the last.

    By default glibc gives much of it back, and touches fresh pages in the next pass: some percent of a step. Does
    nothing, and says so by False, where the environment sets malloc's thresholds, or without glibc.
    """
    if _OF_USERS & os.environ.keys():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20) and mallopt(_TRIM_THRESHOLD, 1 << 30))


class MemoryPool:
    """Gives out memory, and keeps some of what nobody uses any more for the next one of that size."""

    def __init__(self, most_kept: int) -> None:
        """``most_kept``: bytes that are kept while nobody uses them."""
        self._most_kept = most_kept
        self._unused: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """An uninitialised uint8 tensor [size], size > 0; its memory comes back when nobody uses it any more."""
        try:
            pages = self._unused[size].pop()
        except IndexError:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
        lease = (ctypes.c_char * size).from_buffer(pages)
        weakref.finalize(lease, self._back, pages).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _back(self, pages: mmap.mmap) -> None:
        """May be called in any thread, and in the middle of :meth:`take`: there is no lock to wait for."""
        self._unused[len(pages)].append(pages)
        while sum(size * len(unused) for size, unused in list(self._unused.items())) > self._most_kept:
            largest = max((size for size, unused in list(self._unused.items()) if unused), default=0)
            with contextlib.suppress(IndexError):  # another thread has just taken it
                self._unused[largest].pop()
