"""Requests to stop a run: signals, or the program that trains it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from planaria.common.signals import handle_stop_signals

REQUEST = "request"
"""reason for the stop of a run by its own program"""


@contextmanager
def stop_requested(stop: Callable[[], bool] | None = None) -> Iterator[Callable[[], str]]:
    """Yield a function that returns why the run should stop: a signal's name, :data:`REQUEST`, or "".

    Signals are SIGINT, SIGTERM, SIGHUP and SIGQUIT. A second one raises KeyboardInterrupt, unless it is a hang-up,
    since a closing terminal may send several. Python delivers signals to the main thread; a run in another thread only
    asks ``stop``.
    """
    requested: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if requested and number != signal.SIGHUP:
            raise KeyboardInterrupt
        requested.append(signal.Signals(number).name)

    def reason() -> str:
        return requested[0] if requested else REQUEST if stop is not None and stop() else ""

    with handle_stop_signals(handler):
        yield reason
