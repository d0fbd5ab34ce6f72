"""Stop signals: from a terminal's keys, its end, and service managers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""a terminal sends all but SIGTERM to every process of a run, of which only the first acts on them"""


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Handle stop signals with ``handler``; leave an ignored hang-up (``nohup``) ignored.

    The call has no effect outside the main thread, which alone may set handlers.
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
def interrupt_on_stop() -> Iterator[threading.Event]:
    """Raise KeyboardInterrupt on any stop signal, so that cleanup runs; yield an event that is set then.

    A closing terminal may send SIGHUP twice, itself and through its shell; the second is ignored.
    """
    hung_up = False
    arrived = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal hung_up
        if number == signal.SIGHUP and hung_up:
            return
        hung_up = hung_up or number == signal.SIGHUP
        arrived.set()
        raise KeyboardInterrupt

    with handle_stop_signals(handler):
        yield arrived


def describe_exit(code: int) -> str:
    """Describe how a process ended, by its exit code as Python reports it."""
    if code >= 0:
        return f"stopped with exit code {code}"
    # some real-time signals have no name
    return f"killed by {signal.Signals(-code).name if -code in {*signal.Signals} else f'signal {-code}'}"


def ignore() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
