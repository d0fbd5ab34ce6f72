"""A tracker in a thread of its own: training waits for nothing that it does, but a while for its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from planaria.report.live.tracker import Tracker

Told = Callable[[Tracker], None]

MOST = 1000
"""calls that wait for a slow tracker; what comes beyond is left out"""
CALL_S = 120.0
"""a call that takes longer hangs: a first one may import a library and wait for a server far away"""
END_S = 60.0
"""so long all trackers together may take at the end of a run, to send what they have"""


class Beside:
    """Has a tracker told things in order. Once it has failed, or hangs, it is told nothing more.

    A thread cannot be killed: one that hangs stays behind, and ends with the process.
    """

    def __init__(self, name: str, tracker: Tracker, most: int = MOST, call_s: float = CALL_S) -> None:
        self._name, self._tracker, self._most, self._call_s = name, tracker, most, call_s
        self._queue: SimpleQueue[Told | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._since: float | None = None
        """when the call under way began"""
        self._failure = ""
        self._slow = self._said_slow = self._left = False

    def tell(self, told: Told) -> None:
        """Have this called when everything before it was."""
        if self._left:
            return
        if self._queue.qsize() >= self._most:
            self._slow = True
            return
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put(told)

    def trouble(self) -> str:
        """What is newly wrong with it, for the log; empty if nothing is. That it is slow, or left, is said once."""
        if self._left:
            return ""
        since = self._since
        if not self._failure and since is not None and time.monotonic() - since > self._call_s:
            self._failure = f"it has not answered for {self._call_s:g} s"
        if self._failure:
            self._left = True
            return f"going on without {self._name} ({self._failure})"
        if self._slow and not self._said_slow:
            self._said_slow = True
            return f"{self._name} is slow: more than {self._most} things wait for it, and it misses what comes beyond"
        return ""

    def finish(self, until: float) -> None:
        """Have it closed, and wait for that until this monotonic time; :meth:`trouble` tells how it went."""
        if self._thread.ident is None or self._left:
            return
        self._queue.put(lambda tracker: tracker.close())
        self._queue.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and not self._failure:
            self._failure = "it did not come to its end in time"

    def _work(self) -> None:
        while (told := self._queue.get()) is not None and not self._left:
            self._since = time.monotonic()
            try:
                told(self._tracker)
            except (Exception, SystemExit) as error:  # whatever somebody's tracker does: no run ends by it
                why = getattr(error, "strerror", None) or error
                self._failure = f"{type(error).__name__}: {why}"
                return
            self._since = None
