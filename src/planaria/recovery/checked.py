"""Memory that is kept for many steps, and held against a checksum before it is used: a flipped bit is one more loss."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from torch import Tensor


class Checked:
    """A row of bytes. Its checksum (CRC-32) is made by a thread: training does not wait."""

    def __init__(self, whole: Tensor) -> None:
        """``whole``: uint8 [n], which nobody writes to any more."""
        self.whole = whole
        self._sum = _beside().submit(_checksum, whole)

    def __deepcopy__(self, memo: object) -> Checked:
        return Checked(self.whole.clone())

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def intact(self) -> bool:
        """Are the bytes what they were?"""
        return self._sum.result() == _checksum(self.whole)


@cache
def _beside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "checksums")


def _checksum(whole: Tensor) -> int:
    return zlib.crc32(whole.numpy().data)
