"""Wait for other threads and processes on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_S = 20.0
"""seconds in which another thread runs even on a busy machine"""


def until(
    condition: Callable[[], object],
    seconds: float = SOON_S,
    meanwhile: Callable[[], object] = lambda: time.sleep(0.005),
    shown: object = "",
) -> None:
    """Call ``meanwhile`` until the condition holds; fail with ``shown`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, shown
        meanwhile()
