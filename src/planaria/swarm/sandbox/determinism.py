"""Deterministic clock, random source and process data for a program. Part of ``process.py``.

Replaced are the usual sources: ``time``, ``datetime``, ``random``, ``os.urandom``, process ids, host name, processors
and folder. Each clock reading advances it by a millisecond, and sleeping returns immediately. Thread scheduling,
library files and real run time remain observable.
"""

from __future__ import annotations

import itertools
import os
import posix
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

BEGAN_NS = 1_577_836_800 * 10**9
"""2020-01-01"""
LOOK_NS = 10**6
UNSTEADY = ("_ctypes", "_datetime", "_zoneinfo", "_uuid", "_ssl", "_sqlite3", "_testcapi", "_testinternalcapi")
"""C modules that read clocks, random sources or memory; most have a Python twin that is used instead"""
FIXED: dict[str, Any] = {
    "getpid": 2, "getppid": 1, "getpgrp": 2, "getuid": 1000, "geteuid": 1000, "getgid": 1000, "getegid": 1000,
    "cpu_count": 1, "process_cpu_count": 1, "getcwd": "/", "getcwdb": b"/", "getloadavg": (0.0, 0.0, 0.0),
    "getpgid": 2, "getsid": 2, "sched_getaffinity": {0},
    "times": os.times_result((0.0, 0.0, 0.0, 0.0, 0.0)), "uname": os.uname_result(("Linux", "host", "1", "1", "any")),
}  # fmt: skip


class FakeClock:
    """Nanoseconds that advance only by reading the clock or sleeping."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        self._now += LOOK_NS
        return self._now

    def sleep(self, seconds: float, /) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self._now += int(seconds * 10**9)


def install() -> None:
    """Replace the real sources before the program's first line."""
    _replace_clocks(FakeClock())
    _replace_random()
    for name, value in FIXED.items():
        _replace((os, posix), name, lambda *_, value=value: value)
    import _thread
    import resource

    nothing = resource.struct_rusage((0.0, 0.0, *[0] * 14))
    _replace((resource,), "getrusage", lambda *_: nothing)
    _replace((_thread,), "get_native_id", lambda: 2)
    for name in UNSTEADY:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in ("ctypes", "sandbox_kernel_limits"):  # these provide access to the process's memory
        sys.modules.pop(name, None)


def _replace_clocks(clock: FakeClock) -> None:
    def of_day() -> int:
        return BEGAN_NS + clock.now()

    for name, read in {
        **dict.fromkeys(("monotonic", "perf_counter", "process_time", "thread_time"), clock.now),
        "time": of_day,
    }.items():
        _replace((time,), name, lambda read=read: read() / 10**9)
        _replace((time,), f"{name}_ns", lambda read=read: read())
    _replace((time,), "clock_gettime", lambda which: (clock.now() if which else of_day()) / 10**9)
    _replace((time,), "clock_gettime_ns", lambda which: clock.now() if which else of_day())
    _replace((time,), "sleep", clock.sleep)
    for name in ("localtime", "gmtime", "ctime"):
        real = getattr(time, name)
        _replace((time,), name, lambda moment=None, real=real: real(of_day() / 10**9 if moment is None else moment))
    requested, written = time.asctime, time.strftime
    _replace((time,), "asctime", lambda moment=None: requested(time.gmtime() if moment is None else moment))
    _replace((time,), "strftime", lambda form, moment=None: written(form, time.gmtime() if moment is None else moment))


def _replace_random() -> None:
    import _random

    seeds, plain = itertools.count(), _random.Random(0)

    class Random(_random.Random):
        """An unseeded generator is seeded by a counter."""

        def seed(self, a: Any = None, /) -> None:
            super().seed(next(seeds) if a is None else a)

    def random_bytes(count: int, flags: int = 0) -> bytes:
        if count < 0:
            raise ValueError("negative argument not allowed")
        return plain.getrandbits(8 * count).to_bytes(count, "big") if count else b""

    _replace((_random,), "Random", Random)
    _replace((os, posix), "urandom", random_bytes)
    _replace((os, posix), "getrandom", random_bytes)


def _replace(modules: tuple[ModuleType, ...], name: str, value: Any) -> None:
    for module in modules:
        if hasattr(module, name):
            setattr(module, name, value)
