"""How a run is asked to stop: by a signal, or by the program that trains it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from planaria.common.signals import handled

REQUEST = "request"
"""the reason of a run that its own program asked to stop"""


@contextmanager
def stop_asked(stop: Callable[[], bool] | None = None) -> Iterator[Callable[[], str]]:
    """What yields tells why the run is to stop at a whole step: a signal's name, or a request; empty if it is not.

    Signals are Ctrl-C, the SIGTERM that announces a preemption, a hang-up and SIGQUIT. A second one interrupts at once,
    unless it is a hang-up: a terminal that is closed may send several. Python delivers signals to the main thread, so a
    run in another one hears of none, and stops when ``stop`` answers that it is to.
    """
    asked: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if asked and number != signal.SIGHUP:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    def reason() -> str:
        return asked[0] if asked else REQUEST if stop is not None and stop() else ""

    with handled(handler):
        yield reason
