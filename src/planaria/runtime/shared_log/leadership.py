"""The lease with which a controller leads a run whose log is shared with other machines (``fleet.shared_log``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from planaria.common.errors import RunStopped, UserError
from planaria.control.log.shared_log import Deposed, LeadershipLost, Lease, LogAppender

RENEWALS = 3
"""renewals of the lease in ``fleet.lease_s``"""


class Leadership:
    """The right of this process to lead a run, as long as it renews its lease; a thread does that.

    A call of the store may hang, so another thread watches the lease.
    """

    def __init__(self, appender: LogAppender, lease_s: float) -> None:
        self.appender, self._lease_s = appender, lease_s
        self._renewed = time.monotonic()
        self._closed = threading.Event()
        self._guarded = threading.Lock()
        self._lost = ""
        """why this process must not lead any more; empty while it may"""
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def when_lost(self, disconnect: Callable[[], object]) -> None:
        """Let a thread call ``disconnect`` once this process may not lead any more, even if it waits for the store."""
        threading.Thread(target=self._watch, args=(disconnect,), name="lease watch", daemon=True).start()

    def add(self, line: str) -> None:
        """Add a line of the log."""
        self.appender.add(line)

    def check(self) -> None:
        """Raise LeadershipLost if another controller leads, or the lease could not be renewed."""
        self._give_up_if_expired()
        if self._lost:
            raise LeadershipLost(self._lost, self.appender.position)

    def _give_up_if_expired(self) -> None:
        """Give up the right to lead once the lease has expired, even if no other process leads: workers may have left.

        A standby stands for election after one ``lease_s``, this process gives up after two: without a standby, a slow
        store costs nothing. If one was elected, the store rejects what this process would append.
        """
        silent_s = time.monotonic() - self._renewed
        if silent_s > 2 * self._lease_s:
            self._lose(
                f"the lease in {self.appender.log.location} was not renewed for {silent_s:.1f} s (the log did not "
                "answer, or this process was stopped); another machine may lead the run"
            )

    def secure(self) -> None:
        """Append all lines to the shared log.

        :raises LeadershipLost: if another controller leads, or the store does not answer.
        """
        self.check()
        try:
            self.appender.flush()
        except (UserError, RunStopped) as error:  # the location of the store has changed, or it does not answer
            self._lose(str(error))
        self.check()

    def _lose(self, why: str) -> None:
        """Give up the right to lead permanently."""
        with self._guarded:
            self._lost = self._lost or why

    def _watch(self, disconnect: Callable[[], object]) -> None:
        while not self._closed.wait(self._lease_s / RENEWALS):
            try:
                self.check()
            except LeadershipLost:
                disconnect()
                return

    def close(self) -> None:
        self._closed.set()
        self._thread.join(self._lease_s)

    def _renew(self) -> None:
        count = 0
        while not self._lost and not self._closed.is_set():
            began = time.monotonic()
            try:
                last = self.appender.log.lease()
                if last is not None and last.term > self.appender.term:
                    self._lose(str(Deposed(last.term)))
                    return
                sign = Lease(term=self.appender.term, leader=self.appender.leader, count=count, at=time.time())
                self.appender.log.renew(sign)
                self._renewed = began
            except (RunStopped, UserError, OSError):
                pass  # the controller stops when that lasts too long
            count += 1
            self._closed.wait(self._lease_s / RENEWALS)
            self._give_up_if_expired()
