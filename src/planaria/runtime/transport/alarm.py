"""A thread that another one wakes after a while, unless that other calls it off: a timer of the kernel's."""

from __future__ import annotations

import ctypes
import os
import time

# Python has these calls from 3.13 on. As ``PyDLL`` they keep the interpreter's lock: they take less than giving it up.
_libc = ctypes.PyDLL(None, use_errno=True)
_settime = _libc.timerfd_settime
_settime.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


class _Times(ctypes.Structure):
    """struct itimerspec: the interval and the time, seconds and nanoseconds each; zero calls it off."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class Alarm:
    """Goes off once, ``after_s`` seconds after it was :meth:`set` last. One thread waits; setting it is cheap."""

    def __init__(self, after_s: float) -> None:
        self._handle = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "no timer")
        self._times = _Times(0, 0, int(after_s), int(after_s % 1 * 1e9)), _Times(0, 0, 0, 0)
        self._set, self._off = (ctypes.addressof(times) for times in self._times)

    def set(self) -> None:
        """Go off in a while, counted from now."""
        _settime(self._handle, 0, self._set, None)

    def clear(self) -> None:
        """Do not go off."""
        _settime(self._handle, 0, self._off, None)

    def wait(self) -> None:
        """Wait until it has gone off."""
        os.read(self._handle, 8)

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
