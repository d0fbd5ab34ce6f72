"""Rate limit of repeated lines."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

MAX_WINDOW_S = 600.0
"""longest window"""


@dataclass
class _Window:
    began: float
    lasts_s: float
    shown: int = 0
    held_back: int = 0

    def __str__(self) -> str:
        return f"{self.held_back} more in {self.lasts_s:g} s not shown"


class Repeats:
    """Shows the first ``shown`` lines of a subject in each window of time and counts the others.

    The next line that is shown states how many were held back. A subject with lines held back gets a window twice as
    long next, up to :data:`MAX_WINDOW_S`. Callers pass the time, in seconds.
    """

    def __init__(self, shown: int = 3, window_s: float = 60.0) -> None:
        self._max_shown = shown
        self._window_s = window_s
        self._windows: dict[Hashable, _Window] = {}

    def limit(self, t: float, subject: Hashable, text: str) -> str | None:
        """Return the line to show at ``t``, or None if it is held back."""
        before = self._windows.get(subject)
        if before is None or t >= before.began + before.lasts_s:
            longer = before is not None and before.held_back > 0
            lasts_s = min(2 * before.lasts_s, MAX_WINDOW_S) if before is not None and longer else self._window_s
            self._windows[subject] = _Window(t, lasts_s, shown=1)
            return text if before is None or not longer else f"{text} ({before})"
        if before.shown < self._max_shown:
            before.shown += 1
            return text
        before.held_back += 1
        return None

    def suppressed(self) -> str:
        """Return the numbers of lines held back at present, by subject, or an empty string if there are none."""
        return "; ".join(f"{subject}: {window}" for subject, window in self._windows.items() if window.held_back)
