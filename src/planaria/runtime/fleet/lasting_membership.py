"""A machine's membership in a run through the loss of its controllers: it returns to the next one with its workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from planaria.common.address import REACHABLE, Reach
from planaria.common.errors import UserError
from planaria.common.stdio import Notify
from planaria.runtime.fleet.joined_machine import Ending, Rejected, RunMembership, WorkerPool
from planaria.runtime.fleet.joining import RunAddress

log = logging.getLogger(__name__)
_RETRY_S = 0.1
"""seconds between two calls to controllers that may lead"""


@dataclass(frozen=True)
class Controllers:
    """Where and when a machine looks for the next controller of its run."""

    addresses: Sequence[str] = ()
    """HOST:PORT of those that may lead; without any, the run is lost with its controller"""
    patience_s: float = 60.0
    """how long to look"""
    silence_s: float = 10.0
    """after which a silent controller may be lost"""


class LastingMembership:
    """The membership of a machine at the controller that leads now."""

    def __init__(
        self,
        first: RunMembership,
        controllers: Controllers,
        notify: Notify,
        notify_of_workers: Notify | None = None,
        workers: int = 1,
        reach: Reach = REACHABLE,
    ) -> None:
        """:param notify: called with lines about controllers
        :param notify_of_workers: called with lines about this machine's workers; by default ``notify``
        :param workers: as for the ``first`` membership
        :param reach: as for the first membership
        """
        self.current = first
        self.rejected_at = ""
        """HOST:PORT of a controller that leads the run, but no longer waits for this machine"""
        self._controllers, self._notify = controllers, notify
        self._notify_of_workers = notify_of_workers or notify
        self._workers, self._reach = workers, reach
        self._ended = threading.Event()
        self._next: RunMembership | None = None
        """membership at another controller, found while the present one was silent"""

    def serve_until_end(self, pool: WorkerPool, asked_to_leave: Callable[[], str]) -> Ending:
        """Serve as :meth:`RunMembership.serve_until_end`, at one controller after the other."""
        elsewhere = self._is_led_elsewhere if self._others() else None
        while True:
            ending = self.current.serve_until_end(
                pool, self._controllers.silence_s, asked_to_leave, self._notify_of_workers, elsewhere
            )
            if ending.how != "lost" or not self._controllers.addresses or self._ended.is_set() or asked_to_leave():
                return ending
            try:
                found = self._follow(pool, asked_to_leave)
            except Rejected as error:
                return Ending("over", str(error)) if error.over else ending
            if found is None:
                return ending
            self.current, self._next = found, None
            pool.address = found.address
            self._notify(f"the controller at {found.address} leads now")

    def end(self) -> None:
        """End the membership, and look for no other controller."""
        self._ended.set()
        self.current.end()

    def _follow(self, pool: WorkerPool, asked_to_leave: Callable[[], str]) -> RunMembership | None:
        """Return to the run at another controller; None if none leads in time.

        :raises Rejected: if it does not wait for this machine; then :attr:`rejected_at` is set, unless the run is over.
        """
        before, patience_s = self.current, self._controllers.patience_s
        before.end()
        pool.leave(before.address)
        if self._next is not None:
            return self._next
        self._notify(f"the controller at {before.address} is lost; waiting up to {patience_s:g} s for another one")
        until = time.monotonic() + patience_s
        for address in cycle([*self._others(), before.address]):
            if asked_to_leave() or self._ended.is_set() or time.monotonic() > until:
                break
            try:
                found = self._return_to(address)
                if not self._ended.is_set():
                    return found
                found.end()
            except Rejected as error:
                if not error.over:
                    self._notify(f"{address}: {error}; joining again")
                    self.rejected_at = address
                raise
            except (OSError, UserError) as error:
                log.debug("%s: does not lead: %s", address, error)
                time.sleep(_RETRY_S)
        return None

    def _is_led_elsewhere(self) -> bool:
        """Call all other controllers that may lead; return whether one does, to which :meth:`_follow` then returns."""
        for address in self._others():
            try:
                self._next = self._return_to(address)
            except Rejected:
                return True
            except (OSError, UserError) as error:
                log.debug("%s: does not lead: %s", address, error)
            else:
                return True
        return False

    def _others(self) -> list[str]:
        return [at for at in self._controllers.addresses if at != self.current.address]

    def _return_to(self, address: str) -> RunMembership:
        """Return to the run at another controller, as :class:`RunMembership`."""
        known = RunAddress(at=address, key=self.current.key.hex())
        return RunMembership(known, self._workers, self._reach, returning=self.current.welcome.host)
