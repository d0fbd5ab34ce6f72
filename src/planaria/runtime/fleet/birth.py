"""What a process of this machine does to outlive nobody, and to leave signals that stop a run to the controller."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that happens.

    The parent is the thread that forked this process, or the main thread of the process that adopted it.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def be_called(name: str) -> None:
    """Under this name (15 bytes of it) `ps` and `top` show the process."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


@contextmanager
def adopting() -> Iterator[None]:
    """Meanwhile orphans among this process's descendants become its own children; one thread may use it at a time.

    For as long as one is awaited, and no longer: whatever else is orphaned below is not for this process to bury.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0))


def _prctl(option: int, value: object) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
