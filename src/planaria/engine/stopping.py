"""How a run is asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Ctrl-C, and the SIGTERM that announces a preemption, are noted in the list: the run stops at the next whole step.

    A second one interrupts at once.
    """
    asked: list[str] = []

    def handler(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, old in before.items():
            signal.signal(number, old)
