"""How a run is asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from planaria.signals import handled


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Ctrl-C, the SIGTERM that announces a preemption, a hang-up and SIGQUIT are noted: the run stops at a whole step.

    A second one interrupts at once, unless it is a hang-up: a terminal that is closed may send several.
    """
    asked: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if asked and number != signal.SIGHUP:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    with handled(handler):
        yield asked
