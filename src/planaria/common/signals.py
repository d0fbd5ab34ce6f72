"""The signals that ask a process to stop: those of a terminal's keys, of its end, and of service managers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""a terminal sends all but SIGTERM to every process of a run, of which only the first is to act on them"""


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """These signals go to ``handler``; a hang-up does not if it was to be ignored before (``nohup``).

    Nothing changes outside of the main thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stops = [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in stops}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def interrupted() -> Iterator[None]:
    """Any of these signals interrupts, as Ctrl-C does, so that whatever was begun is wound up.

    A terminal that is closed may hang up twice, itself and by its shell: the second time changes nothing.
    """
    hung_up = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal hung_up
        if number == signal.SIGHUP and hung_up:
            return
        hung_up = hung_up or number == signal.SIGHUP
        raise KeyboardInterrupt

    with handled(handler):
        yield


def ending(code: int) -> str:
    """How a process ended, in words, by its exit code as Python gives it."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"stopped with exit code {code}"


def ignore() -> None:
    """Be deaf to them from now on."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
